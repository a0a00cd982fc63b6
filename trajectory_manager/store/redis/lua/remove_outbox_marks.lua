-- Removes outbox marks of rollouts that did not finish. Idempotent. ARGV: run_id, rollout_id...
local config, outbox = KEYS[1], KEYS[11]
if redis.call('EXISTS', config) == 0 then return {'error', 'UNKNOWN_RUN', ARGV[1]} end
for i = 2, #ARGV do redis.call('ZREM', outbox, ARGV[i]) end
return {'ok'}
