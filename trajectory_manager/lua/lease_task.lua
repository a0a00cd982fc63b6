-- Leases one open sample, admitting a group if none is open. ARGV: run_id, nonce, purpose...
local config, counters, tasks, groups, leases, nonces = KEYS[1], KEYS[2], KEYS[3], KEYS[8], KEYS[9], KEYS[10]
local queues = {['1'] = KEYS[4], ['2'] = KEYS[5]}
local open = {['1'] = KEYS[6], ['2'] = KEYS[7]}
local rules = redis.call('GET', config)
if not rules then return {'refused', 'UNKNOWN_RUN', ARGV[1]} end
rules = cjson.decode(rules)

local function admits(purpose)
  if purpose ~= '1' then return true end
  local counts = redis.call('HMGET', counters, 'admitted', 'discarded', 'taken')
  local outstanding = tonumber(counts[1] or 0) - tonumber(counts[2] or 0) - tonumber(counts[3] or 0)
  return outstanding < rules.groups_per_step * (rules.max_staleness + 1)
end

local function admitted(purpose)
  if not admits(purpose) then return nil end
  local task_id = redis.call('LPOP', queues[purpose])
  if not task_id then return nil end
  local group = {purpose = purpose, replaced = 0, done = 0, slots = {}}
  for slot = 1, cjson.decode(redis.call('HGET', tasks, task_id)).num_samples do
    group.slots[slot] = {attempt = 0, state = 'open'}
    if slot > 1 then redis.call('RPUSH', open[purpose], task_id .. '/' .. (slot - 1)) end
  end
  if purpose == '1' then redis.call('HINCRBY', counters, 'admitted', 1) end
  return task_id, 1, group
end

local function opened(purpose)
  while true do
    local name = redis.call('LPOP', open[purpose])
    if not name then return admitted(purpose) end
    local task_id, slot = string.match(name, '^(.+)/(%d+)$')
    local group = redis.call('HGET', groups, task_id)
    -- The group may have been discarded meanwhile.
    if group then return task_id, tonumber(slot) + 1, cjson.decode(group) end
  end
end

for i = 3, #ARGV do
  local task_id, slot, group = opened(ARGV[i])
  if task_id then
    local attempt = group.slots[slot].attempt + 1
    group.slots[slot] = {attempt = attempt, state = 'leased'}
    redis.call('HSET', groups, task_id, cjson.encode(group))
    local rollout_id = string.format('%s/%d/%d', task_id, slot - 1, attempt)
    local time = redis.call('TIME')
    local now = time[1] * 1000 + time[2] / 1000
    redis.call('ZADD', leases, now + rules.lease_seconds * 1000, rollout_id)
    redis.call('HSET', nonces, rollout_id, ARGV[2])
    return {'ok', rollout_id, redis.call('HGET', tasks, task_id), tostring(rules.lease_seconds)}
  end
end
return {'ok'}
