-- Rollouts with their rows, newest first. ARGV: run_id, number before which they were started or 0, limit.
-- Returns how many were started, the floor, the number of the first, names, and rows. Numbers are consecutive.
local config, counters, rollouts, rows = KEYS[1], KEYS[2], KEYS[12], KEYS[27]
local run_id, before, limit = unpack(ARGV)
if redis.call('EXISTS', config) == 0 then return {'error', 'UNKNOWN_RUN', run_id} end
local counts = redis.call('HMGET', counters, 'registered', 'rows_floor')
local floor = counts[2] or '0'
local names = redis.call('ZREVRANGEBYSCORE', rollouts, before == '0' and '+inf' or '(' .. before, '(' .. floor,
  'LIMIT', 0, limit)
if #names == 0 then return {'ok', counts[1] or '0', floor, '0', names, {}} end
return {'ok', counts[1], floor, redis.call('ZSCORE', rollouts, names[1]), names, redis.call('HMGET', rows, unpack(names))}
