-- Creates a run. ARGV: run_id, config. Returns the existing config, if there is one.
local config = KEYS[1]
local existing = redis.call('GET', config)
if existing then return {'ok', existing} end
redis.call('SET', config, ARGV[2])
return {'ok'}
