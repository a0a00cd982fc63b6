-- Adds to the run's count of stored tokens. ARGV: run_id, delta (negative after a deletion).
local config, counters = KEYS[1], KEYS[2]
if redis.call('EXISTS', config) == 0 then return {'error', 'UNKNOWN_RUN', ARGV[1]} end
-- Tokens that a killed manager appended before its next sweep were never counted, and may be deleted.
if redis.call('HINCRBY', counters, 'tokens', ARGV[2]) < 0 then redis.call('HSET', counters, 'tokens', 0) end
if tonumber(ARGV[2]) < 0 then redis.call('HINCRBY', counters, 'version:tasks', 1) end
return {'ok'}
