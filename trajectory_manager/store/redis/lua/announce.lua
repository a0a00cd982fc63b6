-- Outbox marks of rollouts that are about to close. ARGV: run_id, rollout_id...
local config, marks = KEYS[1], KEYS[11]
if redis.call('EXISTS', config) == 0 then return {'refused', 'UNKNOWN_RUN', ARGV[1]} end
local time = redis.call('TIME')
for i = 2, #ARGV do redis.call('ZADD', marks, 'NX', time[1] * 1000 + time[2] / 1000, ARGV[i]) end
return {'ok'}
