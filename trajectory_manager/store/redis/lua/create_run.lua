-- Creates a run. ARGV: run_id, config. Returns the existing config, if there is one.
local config, counters = KEYS[1], KEYS[2]
local existing = redis.call('GET', config)
if existing then return {'ok', existing} end
if redis.call('HEXISTS', counters, 'deleting') == 1 then return {'error', 'DELETED_RUN', ARGV[1]} end
local now = redis.call('TIME')
redis.call('HSET', counters, 'created', now[1] .. '.' .. string.format('%06d', now[2]))
redis.call('SET', config, ARGV[2])
return {'ok'}
