-- Creates a run. ARGV: run_id, config. Answers the config that is there already.
local config = KEYS[1]
local existing = redis.call('GET', config)
if existing then return {'ok', existing} end
redis.call('SET', config, ARGV[2])
return {'ok'}
