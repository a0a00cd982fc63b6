-- Tells groups how rollouts of theirs ended. Idempotent: only the leased attempt of a slot counts.
-- ARGV: run_id, max_replacements, max_dead_letters, then for each rollout_id and settlement.
-- Answers for each the effect and, for a discarded group, the reason.
local config, counters, tasks, groups, leases, nonces, marks, ready, dead, order, ended =
  KEYS[1], KEYS[2], KEYS[3], KEYS[8], KEYS[9], KEYS[10], KEYS[11], KEYS[13], KEYS[17], KEYS[18], KEYS[22]
local open = {['1'] = KEYS[6], ['2'] = KEYS[7]}
local run_id, max_replacements, max_dead_letters = unpack(ARGV, 1, 3)
local rules = redis.call('GET', config)
if not rules then return {'refused', 'UNKNOWN_RUN', run_id} end
rules = cjson.decode(rules)
local FAILURES, ZERO_VARIANCE = 1, 4

local function settle(rollout_id, settlement)
  redis.call('ZREM', marks, rollout_id)
  redis.call('ZREM', leases, rollout_id)
  redis.call('HDEL', nonces, rollout_id)

  local task_id, index, attempt = string.match(rollout_id, '^(.+)/(%d+)/(%d+)$')
  local encoded = task_id and redis.call('HGET', groups, task_id)
  if not encoded then return {'ignored'} end
  local group = cjson.decode(encoded)
  local slot = group.slots[tonumber(index) + 1]
  if not slot or slot.state ~= 'leased' or slot.attempt ~= tonumber(attempt) then
    return {'ignored'}
  end
  settlement = cjson.decode(settlement)

  local function save() redis.call('HSET', groups, task_id, cjson.encode(group)) end

  -- Nobody needs the rollouts of the group that still run: the sweeper closes them.
  local function end_leases()
    for i, other in ipairs(group.slots) do
      local name = string.format('%s/%d/%d', task_id, i - 1, other.attempt)
      redis.call('ZADD', leases, 'XX', 0, name)
      redis.call('HDEL', nonces, name)
    end
  end

  local function discard(reason, message)
    end_leases()
    redis.call('HDEL', groups, task_id)
    redis.call('ZREM', order, task_id)
    if group.purpose == '1' then redis.call('HINCRBY', counters, 'discarded', 1) end
    local time, attempts, made = redis.call('TIME'), {}, {task_id}
    for i, other in ipairs(group.slots) do attempts[i], made[i + 1] = other.attempt, other.attempt end
    redis.call('RPUSH', dead, cjson.encode({
      task_id = task_id, reason = reason, message = message, attempts = attempts,
      time = time[1] + time[2] / 1000000
    }))
    redis.call('LTRIM', dead, -max_dead_letters, -1)
    redis.call('ZADD', ended, redis.call('HGET', counters, 'committed') or 0, cjson.encode(made))
    redis.call('HINCRBY', counters, 'version:tasks', 1)
    redis.call('HINCRBY', counters, 'version:ready', 1)
    return {'discarded', reason}
  end

  local function replace()
    group.replaced = group.replaced + 1
    redis.call('HINCRBY', counters, 'replaced', 1)
    if group.replaced > tonumber(max_replacements) then return discard(FAILURES, settlement.message) end
    slot.state = 'open'
    save()
    redis.call('LPUSH', open[group.purpose], task_id .. '/' .. index)
    redis.call('HINCRBY', counters, 'version:tasks', 1)
    return {'replaced'}
  end

  -- The reward that all samples of the group have, if they are several and have the same.
  local function same_reward()
    local reward
    for _, other in ipairs(group.slots) do
      if other.state == 'done' then
        if other.reward == '' or other.reward ~= (reward or other.reward) then return nil end
        reward = other.reward
      end
    end
    return group.done > 1 and reward
  end

  -- Queues a cell for each required column of each sample; complete_columns.lua makes the group ready.
  local function waits_for_columns()
    local missing, cells, queue = 0, KEYS[19], KEYS[20]
    local required = rules.required_columns
    for _, other in ipairs(#required > 0 and group.slots or {}) do
      for _, sample in ipairs(other.samples or {}) do
        local number = string.format('%012d', redis.call('HINCRBY', counters, 'column_samples', 1))
        for _, column in ipairs(required) do
          redis.call('HSET', cells, column .. ' ' .. sample, number)
          redis.call('ZADD', queue, 0, column .. ' ' .. number .. ' ' .. sample)
          missing = missing + 1
        end
      end
    end
    if missing == 0 then return false end
    redis.call('HSET', cells, task_id, missing)
    redis.call('HINCRBY', counters, 'incomplete', 1)
    redis.call('HINCRBY', counters, 'version:columns', 1)
    return true
  end

  local function complete()
    if group.purpose ~= '1' then
      redis.call('HDEL', groups, task_id)
      return {'complete'}
    end
    local reward = rules.zero_variance_reward ~= '' and same_reward()
    if reward then return discard(ZERO_VARIANCE, 'all rewards are ' .. reward) end
    if waits_for_columns() then return {'complete'} end
    redis.call('RPUSH', ready, task_id)
    redis.call('HINCRBY', counters, 'version:ready', 1)
    return {'complete'}
  end

  -- The samples that finished first are enough.
  local function close_group()
    end_leases()
    for _, other in ipairs(group.slots) do
      if other.state ~= 'done' then
        other.state = 'surplus'
      elseif #other.samples > 0 then
        group.min_version = math.min(group.min_version or other.min_version, other.min_version)
      end
    end
    group.min_version = group.min_version or 0
    save()
    return complete()
  end

  if not settlement.finished then return replace() end
  slot.state, slot.reward, slot.rewards = 'done', settlement.reward, settlement.rewards
  slot.min_version, slot.samples, slot.tokens = settlement.min_version, settlement.samples, settlement.tokens
  group.done = group.done + 1
  if group.done == cjson.decode(redis.call('HGET', tasks, task_id)).num_samples then return close_group() end
  save()
  return {'done'}
end

local settled = {}
for i = 4, #ARGV, 2 do table.insert(settled, settle(ARGV[i], ARGV[i + 1])) end
return {'ok', settled}
