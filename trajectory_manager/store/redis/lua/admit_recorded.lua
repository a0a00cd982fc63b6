-- requires: _admission
-- Admits groups whose rollouts are recorded already, all or none: each slot is leased to its first attempt.
-- ARGV: run_id, then task_id and task of each. Returns the number of new groups, and how many more admission takes.
local config, counters, tasks, groups, leases, rollouts, order =
  KEYS[1], KEYS[2], KEYS[3], KEYS[8], KEYS[9], KEYS[12], KEYS[18]
local rules = redis.call('GET', config)
if not rules then return {'error', 'UNKNOWN_RUN', ARGV[1]} end
rules = cjson.decode(rules)
local new = {}
for i = 2, #ARGV, 2 do
  local known = redis.call('HGET', tasks, ARGV[i])
  if not known then table.insert(new, i) end
  if known and known ~= ARGV[i + 1] then return {'error', 'OTHER_TASK', ARGV[i]} end
end
local counts = redis.call('HMGET', counters, 'admitted', 'discarded', 'leased_groups', 'tokens', 'training')
for i = 1, 5 do counts[i] = tonumber(counts[i] or 0) end
local outstanding, stored = counts[1] - counts[2] - counts[3], counts[4]
local free = math.max(0, admission_limit(rules, counts[5] ~= 0, stored) - outstanding)
if #new > free then
  local cap = rules.max_stored_tokens
  if cap > 0 and stored > cap then
    return {'error', 'FULL_RUN', ARGV[1], string.format('%d', stored), string.format('%d', cap)}
  end
  return {'error', 'CLOSED_ADMISSION', string.format('%d', #new), string.format('%d', free)}
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
    redis.call('ZADD', rollouts, redis.call('HINCRBY', counters, 'registered', 1), rollout_id)
  end
  redis.call('HSET', tasks, task_id, task)
  redis.call('HSET', groups, task_id, cjson.encode(group))
  redis.call('ZADD', order, group.admission, task_id)
end
return {'ok', #new, free - #new}
