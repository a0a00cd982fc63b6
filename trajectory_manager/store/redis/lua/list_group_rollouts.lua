-- The rollouts of a task that were started, newest first. ARGV: run_id, task_id.
local config, tasks, rollouts = KEYS[1], KEYS[3], KEYS[12]
local run_id, task_id = unpack(ARGV)
local rules = redis.call('GET', config)
if not rules then return {'error', 'UNKNOWN_RUN', run_id} end
local task = redis.call('HGET', tasks, task_id)
if not task then return {'ok', {}} end
local num_slots = cjson.decode(task).num_samples + (cjson.decode(rules).num_extra_samples or 0)
-- More attempts than a group may replace one after the other: an agent may end before it starts one.
local MISSED = 12
local found = {}
for slot = 0, num_slots - 1 do
  local attempt, newest = 1, 0
  while attempt <= newest + MISSED do
    local name = string.format('%s/%d/%d', task_id, slot, attempt)
    local number = redis.call('ZSCORE', rollouts, name)
    if number then
      newest = attempt
      table.insert(found, {tonumber(number), name})
    end
    attempt = attempt + 1
  end
end
table.sort(found, function(a, b) return a[1] > b[1] end)
local names = {}
for i, each in ipairs(found) do names[i] = each[2] end
return {'ok', names}
