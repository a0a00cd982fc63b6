-- Task leases that expired (score: when, in ms) or that their group ended (score: 0). ARGV: run_id, limit.
local config, leases = KEYS[1], KEYS[9]
if redis.call('EXISTS', config) == 0 then return {'error', 'UNKNOWN_RUN', ARGV[1]} end
local time = redis.call('TIME')
local now = string.format('%.3f', time[1] * 1000 + time[2] / 1000)
return {'ok', redis.call('ZRANGEBYSCORE', leases, '-inf', now, 'WITHSCORES', 'LIMIT', 0, ARGV[2])}
