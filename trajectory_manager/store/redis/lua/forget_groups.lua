-- Drops the records of ended groups whose rollouts are deleted. Idempotent.
-- ARGV: run_id, '["task_id", attempts of each slot...]'...
local config, ended, trained = KEYS[1], KEYS[22], KEYS[23]
if redis.call('EXISTS', config) == 0 then return {'error', 'UNKNOWN_RUN', ARGV[1]} end
for i = 2, #ARGV do
  local group = cjson.decode(ARGV[i])
  -- Encoded by cjson, as the record is: other encoders escape other characters.
  if redis.call('ZREM', ended, cjson.encode(group)) == 1 then
    redis.call('HDEL', trained, group[1], group[1] .. ' attempts')
  end
end
return {'ok'}
