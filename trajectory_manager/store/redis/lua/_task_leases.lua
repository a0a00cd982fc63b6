-- Leases of tasks: admission of groups and slots of admitted ones. The values equal EmptyReason.
local NOTHING_QUEUED, ADMISSION_CLOSED, STORE_FULL, RUN_ENDED = 1, 2, 3, 4

-- The run's rules with what admission counts; nil: no such run.
local function read_run()
  local rules = redis.call('GET', KEYS[1])
  if not rules then return nil end
  local counts = redis.call(
    'HMGET', KEYS[2], 'admitted', 'discarded', 'leased_groups', 'tokens', 'training', 'next_base', 'ended')
  for i = 1, 6 do counts[i] = tonumber(counts[i] or 0) end
  rules = cjson.decode(rules)
  local training = counts[5] ~= 0
  return {
    rules = rules, outstanding = counts[1] - counts[2] - counts[3], next_base = counts[6], ended = counts[7],
    limit = admission_limit(rules, training, counts[4]), open_limit = staleness_limit(rules, training)
  }
end

-- Why no TRAIN group is admitted; nil: one is.
local function closed_by(run)
  if run.outstanding < run.limit then return nil end
  return run.outstanding < run.open_limit and STORE_FULL or ADMISSION_CLOSED
end

-- A group of `number` samples, counted as admitted; `attempts` are those its slots had before.
local function admitted_group(run, task_id, purpose, number, attempts)
  local group = {purpose = purpose, replaced = 0, done = 0, slots = {}}
  if purpose == '1' then
    local WAIT = 2
    number = number + run.rules.num_extra_samples
    group.admission = redis.call('HINCRBY', KEYS[2], 'admitted', 1)
    redis.call('ZADD', KEYS[18], group.admission, task_id)
    local batches = math.floor(run.outstanding / run.rules.groups_per_step)
    local version = run.next_base + batches - run.rules.max_staleness
    if run.rules.staleness_policy ~= WAIT and version > 0 then group.required_version = version end
  end
  for slot = 1, number do group.slots[slot] = {attempt = attempts[slot] or 0, state = 'open'} end
  return group
end

local function lease_answer(run, rollout_id, task_id)
  return {'ok', rollout_id, redis.call('HGET', KEYS[3], task_id), tostring(run.rules.lease_seconds)}
end

-- The answer with the lease that has this nonce, renewed, while it is held.
local function held_lease(run, nonce)
  local rollout_id = redis.call('HGET', KEYS[10], nonce)
  if not rollout_id or redis.call('HGET', KEYS[10], rollout_id) ~= nonce then return nil end
  local time = redis.call('TIME')
  local expires = tonumber(redis.call('ZSCORE', KEYS[9], rollout_id) or 0)
  local now = time[1] * 1000 + time[2] / 1000
  if expires <= now then return nil end
  redis.call('ZADD', KEYS[9], now + run.rules.lease_seconds * 1000, rollout_id)
  return lease_answer(run, rollout_id, (string.match(rollout_id, '^(.+)/%d+/%d+$')))
end

-- Leases a slot under a nonce, stores its group, and returns the answer.
local function lease_slot(run, task_id, slot, group, nonce)
  local groups, leases, nonces = KEYS[8], KEYS[9], KEYS[10]
  local attempt = group.slots[slot].attempt + 1
  group.slots[slot] = {attempt = attempt, state = 'leased'}
  redis.call('HSET', groups, task_id, cjson.encode(group))
  local rollout_id = string.format('%s/%d/%d', task_id, slot - 1, attempt)
  local time = redis.call('TIME')
  local now = time[1] * 1000 + time[2] / 1000
  redis.call('ZADD', leases, now + run.rules.lease_seconds * 1000, rollout_id)
  redis.call('HSET', nonces, rollout_id, nonce, nonce, rollout_id)
  return lease_answer(run, rollout_id, task_id)
end
