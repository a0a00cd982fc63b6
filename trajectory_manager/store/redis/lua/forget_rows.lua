-- Marks rollouts as deleted. Idempotent. ARGV: run_id, mark, rollout_id...
local config, counters, rollouts, rows = KEYS[1], KEYS[2], KEYS[12], KEYS[27]
if redis.call('EXISTS', config) == 0 then return {'error', 'UNKNOWN_RUN', ARGV[1]} end
local floor = tonumber(redis.call('HGET', counters, 'rows_floor') or 0)
for i = 3, #ARGV do
  local number = redis.call('ZSCORE', rollouts, ARGV[i])
  if number and tonumber(number) > floor then redis.call('HSET', rows, ARGV[i], ARGV[2]) end
end
return {'ok'}
