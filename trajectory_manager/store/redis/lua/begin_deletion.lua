-- Begins to delete an ended run, or continues: without its config the run does not exist for any other call.
-- ARGV: run_id.
local config, counters = KEYS[1], KEYS[2]
local marks = redis.call('HMGET', counters, 'ended', 'deleting')
if marks[2] then return {'ok'} end
if redis.call('EXISTS', config) == 0 then return {'error', 'UNKNOWN_RUN', ARGV[1]} end
if not marks[1] then return {'error', 'RUNNING_RUN', ARGV[1]} end
redis.call('HSET', counters, 'deleting', 1)
redis.call('DEL', config)
return {'ok'}
