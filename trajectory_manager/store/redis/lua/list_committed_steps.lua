-- The committed step that trained each rollout; 0: none. ARGV: run_id, then task_id, slot, attempt of each.
local config, trained = KEYS[1], KEYS[23]
if redis.call('EXISTS', config) == 0 then return {'error', 'UNKNOWN_RUN', ARGV[1]} end
local found = {}
for i = 2, #ARGV, 3 do
  local step, counted = unpack(redis.call('HMGET', trained, ARGV[i], ARGV[i] .. ' attempts'))
  local attempt = counted and cjson.decode(counted)[ARGV[i + 1] + 1]
  table.insert(found, attempt == tonumber(ARGV[i + 2]) and tonumber(step) or 0)
end
return {'ok', found}
