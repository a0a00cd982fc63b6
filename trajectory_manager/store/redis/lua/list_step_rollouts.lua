-- Samples or rollouts of a step that is leased or committed. ARGV: run_id, step.
local config, ledger, ended, trained = KEYS[1], KEYS[14], KEYS[22], KEYS[23]
local run_id, step = unpack(ARGV)
if redis.call('EXISTS', config) == 0 then return {'error', 'UNKNOWN_RUN', run_id} end
local entry = redis.call('HGET', ledger, step)
if entry then
  entry = cjson.decode(entry)
  local names = entry.samples
  for _, name in ipairs(entry.replayed) do table.insert(names, name) end
  return {'ok', names}
end
local names = {}
for _, group in ipairs(redis.call('ZRANGEBYSCORE', ended, step, step)) do
  local task_id = cjson.decode(group)[1]
  local found = redis.call('HMGET', trained, task_id, task_id .. ' attempts')
  if found[1] == step then
    for slot, attempt in ipairs(cjson.decode(found[2])) do
      if attempt > 0 then table.insert(names, string.format('%s/%d/%d', task_id, slot - 1, attempt)) end
    end
  end
end
return {'ok', names}
