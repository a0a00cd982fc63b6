-- requires: _admission
-- Leases one open slot, admitting a group if none is open. ARGV: run_id, nonce, purpose...
-- FULL_RUN when only max_stored_tokens keeps a queued TRAIN task out.
local config, counters, tasks, groups, leases, nonces = KEYS[1], KEYS[2], KEYS[3], KEYS[8], KEYS[9], KEYS[10]
local order = KEYS[18]
local queues = {['1'] = KEYS[4], ['2'] = KEYS[5]}
local open_slots = {['1'] = KEYS[6], ['2'] = KEYS[7]}
local rules = redis.call('GET', config)
if not rules then return {'error', 'UNKNOWN_RUN', ARGV[1]} end
rules = cjson.decode(rules)

local counts = redis.call(
  'HMGET', counters, 'admitted', 'discarded', 'leased_groups', 'tokens', 'training', 'next_base')
for i = 1, 6 do counts[i] = tonumber(counts[i] or 0) end
local outstanding, stored, training = counts[1] - counts[2] - counts[3], counts[4], counts[5] ~= 0
local limit = admission_limit(rules, training, stored)

local function admit(purpose)
  if purpose == '1' and outstanding >= limit then return nil end
  local entry = redis.call('LPOP', queues[purpose])
  if not entry then return nil end
  local task_id, attempts = string.match(entry, '^(%S+)(.*)$')
  local group = {purpose = purpose, replaced = 0, done = 0, slots = {}}
  local number = cjson.decode(redis.call('HGET', tasks, task_id)).num_samples
  if purpose == '1' then
    local WAIT = 2
    number = number + rules.num_extra_samples
    group.admission = redis.call('HINCRBY', counters, 'admitted', 1)
    redis.call('ZADD', order, group.admission, task_id)
    local batches = math.floor(outstanding / rules.groups_per_step)
    local version = counts[6] + batches - rules.max_staleness
    if rules.staleness_policy ~= WAIT and version > 0 then group.required_version = version end
  end
  -- A requeued dead letter continues after the attempts it had.
  local earlier = string.gmatch(attempts, '%d+')
  for slot = 1, number do
    group.slots[slot] = {attempt = tonumber(earlier() or 0), state = 'open'}
    if slot > 1 then redis.call('RPUSH', open_slots[purpose], task_id .. '/' .. (slot - 1)) end
  end
  return task_id, 1, group
end

local function next_slot(purpose)
  while true do
    local name = redis.call('LPOP', open_slots[purpose])
    if not name then return admit(purpose) end
    local task_id, slot = string.match(name, '^(.+)/(%d+)$')
    local group = redis.call('HGET', groups, task_id)
    -- The group may have ended or completed since the slot was opened.
    if group then
      group, slot = cjson.decode(group), tonumber(slot) + 1
      if group.slots[slot].state == 'open' then return task_id, slot, group end
    end
  end
end

local is_full = false
for i = 3, #ARGV do
  local task_id, slot, group = next_slot(ARGV[i])
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
  is_full = is_full or ARGV[i] == '1' and outstanding < staleness_limit(rules, training)
    and redis.call('LLEN', queues['1']) > 0
end
if is_full then
  local cap = rules.max_stored_tokens
  return {'error', 'FULL_RUN', ARGV[1], string.format('%d', stored), string.format('%d', cap)}
end
return {'ok'}
