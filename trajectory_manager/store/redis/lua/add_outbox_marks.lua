-- Adds outbox marks: these rollouts are about to finish and must be settled. Idempotent. ARGV: run_id, rollout_id...
local config, outbox = KEYS[1], KEYS[11]
if redis.call('EXISTS', config) == 0 then return {'error', 'UNKNOWN_RUN', ARGV[1]} end
local time = redis.call('TIME')
for i = 2, #ARGV do redis.call('ZADD', outbox, 'NX', time[1] * 1000 + time[2] / 1000, ARGV[i]) end
return {'ok'}
