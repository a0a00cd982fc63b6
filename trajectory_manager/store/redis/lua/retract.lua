-- Takes outbox marks back: their rollouts were not closed. ARGV: run_id, rollout_id...
local config, marks = KEYS[1], KEYS[11]
if redis.call('EXISTS', config) == 0 then return {'refused', 'UNKNOWN_RUN', ARGV[1]} end
for i = 2, #ARGV do redis.call('ZREM', marks, ARGV[i]) end
return {'ok'}
