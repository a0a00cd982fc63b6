-- Counts tokens that were stored or deleted. ARGV: run_id, delta.
local config, counters = KEYS[1], KEYS[2]
if redis.call('EXISTS', config) == 0 then return {'refused', 'UNKNOWN_RUN', ARGV[1]} end
-- Deletion counts exactly; the tokens that a killed manager appended before its next sweep were never counted.
if redis.call('HINCRBY', counters, 'tokens', ARGV[2]) < 0 then redis.call('HSET', counters, 'tokens', 0) end
if tonumber(ARGV[2]) < 0 then redis.call('HINCRBY', counters, 'version:tasks', 1) end
return {'ok'}
