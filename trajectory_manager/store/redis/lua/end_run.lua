-- Ends a run. Idempotent. ARGV: run_id.
local config, counters = KEYS[1], KEYS[2]
if redis.call('EXISTS', config) == 0 then return {'error', 'UNKNOWN_RUN', ARGV[1]} end
local now = redis.call('TIME')
redis.call('HSETNX', counters, 'ended', now[1] .. '.' .. string.format('%06d', now[2]))
redis.call('HINCRBY', counters, 'version:tasks', 1)
return {'ok'}
