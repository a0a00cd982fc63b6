-- Drops rows of the oldest rollouts, a bounded number at a time. ARGV: run_id, how many rollouts keep theirs.
local config, counters, rollouts, rows = KEYS[1], KEYS[2], KEYS[12], KEYS[27]
if redis.call('EXISTS', config) == 0 then return {'error', 'UNKNOWN_RUN', ARGV[1]} end
local BATCH = 1000
local counts = redis.call('HMGET', counters, 'registered', 'rows_floor')
local floor = tonumber(counts[2] or 0)
local last = math.min(tonumber(counts[1] or 0) - tonumber(ARGV[2]), floor + BATCH)
if last <= floor then return {'ok'} end
local names = redis.call('ZRANGEBYSCORE', rollouts, '(' .. string.format('%d', floor), string.format('%d', last))
if #names > 0 then redis.call('HDEL', rows, unpack(names)) end
redis.call('HSET', counters, 'rows_floor', string.format('%d', last))
return {'ok'}
