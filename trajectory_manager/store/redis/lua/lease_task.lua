-- Leases one open sample, admitting a group if none is open. ARGV: run_id, nonce, purpose...
-- Refused when only the cap on stored tokens keeps a queued TRAIN task out.
local config, counters, tasks, groups, leases, nonces = KEYS[1], KEYS[2], KEYS[3], KEYS[8], KEYS[9], KEYS[10]
local order = KEYS[18]
local queues = {['1'] = KEYS[4], ['2'] = KEYS[5]}
local open = {['1'] = KEYS[6], ['2'] = KEYS[7]}
local rules = redis.call('GET', config)
if not rules then return {'refused', 'UNKNOWN_RUN', ARGV[1]} end
rules = cjson.decode(rules)

local counts = redis.call(
  'HMGET', counters, 'admitted', 'discarded', 'taken', 'tokens', 'training', 'next_base')
for i = 1, 6 do counts[i] = tonumber(counts[i] or 0) end
local outstanding, stored = counts[1] - counts[2] - counts[3], counts[4]
local cap, WAIT = rules.max_stored_tokens, 2
local waits = rules.staleness_policy == WAIT
-- While a step is trained one batch fewer, see RunConfig.max_outstanding_groups.
local ahead = rules.max_staleness + ((waits or counts[5] == 0) and 1 or 0)
local bound = rules.groups_per_step * ahead
local limit = bound
if cap > 0 and stored > cap then
  -- With retention the next step frees tokens: closing admission to it would be for ever.
  limit = rules.retention_steps > 0 and math.min(limit, rules.groups_per_step) or 0
end

local function admitted(purpose)
  if purpose == '1' and outstanding >= limit then return nil end
  local entry = redis.call('LPOP', queues[purpose])
  if not entry then return nil end
  local task_id, attempts = string.match(entry, '^(%S+)(.*)$')
  local group = {purpose = purpose, replaced = 0, done = 0, slots = {}}
  local number = cjson.decode(redis.call('HGET', tasks, task_id)).num_samples
  if purpose == '1' then
    number = number + rules.num_extra_samples
    group.admission = redis.call('HINCRBY', counters, 'admitted', 1)
    redis.call('ZADD', order, group.admission, task_id)
    local batches = math.floor(outstanding / rules.groups_per_step)
    local version = counts[6] + batches - rules.max_staleness
    if not waits and version > 0 then group.required_version = version end
  end
  -- A task that was a dead letter goes on after the attempts of its earlier life.
  local earlier = string.gmatch(attempts, '%d+')
  for slot = 1, number do
    group.slots[slot] = {attempt = tonumber(earlier() or 0), state = 'open'}
    if slot > 1 then redis.call('RPUSH', open[purpose], task_id .. '/' .. (slot - 1)) end
  end
  return task_id, 1, group
end

local function opened(purpose)
  while true do
    local name = redis.call('LPOP', open[purpose])
    if not name then return admitted(purpose) end
    local task_id, slot = string.match(name, '^(.+)/(%d+)$')
    local group = redis.call('HGET', groups, task_id)
    -- The group may have left or have enough samples meanwhile.
    if group then
      group, slot = cjson.decode(group), tonumber(slot) + 1
      if group.slots[slot].state == 'open' then return task_id, slot, group end
    end
  end
end

local capped = false
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
  capped = capped or ARGV[i] == '1' and outstanding < bound and redis.call('LLEN', queues['1']) > 0
end
if capped then
  return {'refused', 'FULL_RUN', ARGV[1], string.format('%d', stored), string.format('%d', cap)}
end
return {'ok'}
