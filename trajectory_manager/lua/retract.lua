-- Takes an outbox mark back: its rollout was not closed. ARGV: run_id, rollout_id.
local config, marks = KEYS[1], KEYS[11]
if redis.call('EXISTS', config) == 0 then return {'refused', 'UNKNOWN_RUN', ARGV[1]} end
redis.call('ZREM', marks, ARGV[2])
return {'ok'}
