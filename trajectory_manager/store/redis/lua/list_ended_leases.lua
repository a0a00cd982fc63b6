-- Task leases that expired (score: when, in ms) or that their group ended (score: 0). ARGV: run_id, limit.
-- Returns them with their scores, when a lease that is extended now expires, and 1 if the run has ended.
local config, leases = KEYS[1], KEYS[9]
local rules = redis.call('GET', config)
if not rules then return {'error', 'UNKNOWN_RUN', ARGV[1]} end
local time = redis.call('TIME')
local now = time[1] * 1000 + time[2] / 1000
local ended = redis.call('ZRANGEBYSCORE', leases, '-inf', string.format('%.3f', now), 'WITHSCORES', 'LIMIT', 0, ARGV[2])
local expires = string.format('%.3f', now + cjson.decode(rules).lease_seconds * 1000)
return {'ok', ended, expires, redis.call('HEXISTS', KEYS[2], 'ended')}
