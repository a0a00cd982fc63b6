-- Admits groups whose rollouts are recorded already: each slot is leased to its rollout, all or none.
-- ARGV: run_id, then task_id and task for each. Answers the groups that were new and the groups that admission
-- still lets in.
local config, counters, tasks, groups, leases, listed, order =
  KEYS[1], KEYS[2], KEYS[3], KEYS[8], KEYS[9], KEYS[12], KEYS[18]
local rules = redis.call('GET', config)
if not rules then return {'refused', 'UNKNOWN_RUN', ARGV[1]} end
rules = cjson.decode(rules)
local new = {}
for i = 2, #ARGV, 2 do
  local known = redis.call('HGET', tasks, ARGV[i])
  if not known then table.insert(new, i) end
  if known and known ~= ARGV[i + 1] then return {'refused', 'OTHER_TASK', ARGV[i]} end
end
local counts = redis.call('HMGET', counters, 'admitted', 'discarded', 'taken', 'tokens', 'training')
local outstanding = tonumber(counts[1] or 0) - tonumber(counts[2] or 0) - tonumber(counts[3] or 0)
-- As in lease_task.
local full = rules.staleness_policy == 2 or tonumber(counts[5] or 0) == 0
local limit = rules.groups_per_step * (rules.max_staleness + (full and 1 or 0))
local stored, cap = tonumber(counts[4] or 0), rules.max_stored_tokens
if cap > 0 and stored > cap then
  -- With retention the next step frees tokens: closing admission to it would be for ever.
  limit = rules.retention_steps > 0 and math.min(limit, rules.groups_per_step) or 0
  if #new > math.max(0, limit - outstanding) then
    return {'refused', 'FULL_RUN', ARGV[1], string.format('%d', stored), string.format('%d', cap)}
  end
end
local free = math.max(0, limit - outstanding)
if #new > free then
  return {'refused', 'CLOSED_ADMISSION', string.format('%d', #new), string.format('%d', free)}
end
local time = redis.call('TIME')
local expires = time[1] * 1000 + time[2] / 1000 + rules.lease_seconds * 1000
for _, i in ipairs(new) do
  local task_id, task = ARGV[i], ARGV[i + 1]
  local group = {purpose = '1', replaced = 0, done = 0, slots = {}}
  group.admission = redis.call('HINCRBY', counters, 'admitted', 1)
  for slot = 1, cjson.decode(task).num_samples do
    local rollout_id = string.format('%s/%d/1', task_id, slot - 1)
    group.slots[slot] = {attempt = 1, state = 'leased'}
    redis.call('ZADD', leases, expires, rollout_id)
    redis.call('ZADD', listed, redis.call('HINCRBY', counters, 'listed', 1), rollout_id)
  end
  redis.call('HSET', tasks, task_id, task)
  redis.call('HSET', groups, task_id, cjson.encode(group))
  redis.call('ZADD', order, group.admission, task_id)
end
return {'ok', #new, free - #new}
