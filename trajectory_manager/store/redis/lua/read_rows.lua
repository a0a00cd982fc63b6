-- The rows of rollouts. ARGV: run_id, rollout_id...
local config, rows = KEYS[1], KEYS[27]
if redis.call('EXISTS', config) == 0 then return {'error', 'UNKNOWN_RUN', ARGV[1]} end
return {'ok', redis.call('HMGET', rows, unpack(ARGV, 2))}
