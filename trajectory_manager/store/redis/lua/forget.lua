-- Drops the record of groups whose rollouts are deleted. Idempotent.
-- ARGV: run_id, '["task_id", attempts of each slot...]'...
local trained, steps = KEYS[22], KEYS[23]
if redis.call('EXISTS', KEYS[1]) == 0 then return {'refused', 'UNKNOWN_RUN', ARGV[1]} end
for i = 2, #ARGV do
  local group = cjson.decode(ARGV[i])
  -- Written as commit.lua wrote it: cjson escapes what other encoders do not.
  if redis.call('ZREM', trained, cjson.encode(group)) == 1 then
    redis.call('HDEL', steps, group[1], group[1] .. ' attempts')
  end
end
return {'ok'}
