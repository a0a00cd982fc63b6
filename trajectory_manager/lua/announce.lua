-- Outbox mark of a rollout that is about to close. ARGV: run_id, rollout_id.
local config, marks = KEYS[1], KEYS[11]
if redis.call('EXISTS', config) == 0 then return {'refused', 'UNKNOWN_RUN', ARGV[1]} end
local time = redis.call('TIME')
redis.call('ZADD', marks, 'NX', time[1] * 1000 + time[2] / 1000, ARGV[2])
return {'ok'}
