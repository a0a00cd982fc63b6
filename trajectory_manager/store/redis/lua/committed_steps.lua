-- The step that trained each rollout. ARGV: run_id, then task_id, slot, attempt for each. 0: none.
local config, steps = KEYS[1], KEYS[23]
if redis.call('EXISTS', config) == 0 then return {'refused', 'UNKNOWN_RUN', ARGV[1]} end
local found = {}
for i = 2, #ARGV, 3 do
  local step, counted = unpack(redis.call('HMGET', steps, ARGV[i], ARGV[i] .. ' attempts'))
  local attempt = counted and cjson.decode(counted)[ARGV[i + 1] + 1]
  table.insert(found, attempt == tonumber(ARGV[i + 2]) and tonumber(step) or 0)
end
return {'ok', found}
