-- requires: _dead_letters _cell_queue _replacements _rows
-- Applies the results of finished rollouts to their groups. Idempotent: only the leased attempt of a slot counts.
-- Columns of a sample are queued with its rollout; complete_cells.lua makes a group ready that lacked some.
-- ARGV: run_id, max_replacements, max_dead_letters, then rollout_id, result, and row of the index or '' of each.
-- Returns of each the effect and, for a discarded group, the reason.
local config, counters, tasks, groups, leases, outbox, ready =
  KEYS[1], KEYS[2], KEYS[3], KEYS[8], KEYS[9], KEYS[11], KEYS[13]
local run_id, max_replacements, max_dead_letters = unpack(ARGV, 1, 3)
local rules = redis.call('GET', config)
if not rules then return {'error', 'UNKNOWN_RUN', run_id} end
rules = cjson.decode(rules)
local limits = {
  required_columns = rules.required_columns,
  max_replacements = tonumber(max_replacements), max_dead_letters = max_dead_letters
}

local function settle(rollout_id, result, row)
  if row ~= '' then keep_row(rollout_id, row) end
  redis.call('ZREM', outbox, rollout_id)
  redis.call('ZREM', leases, rollout_id)
  end_nonce(rollout_id)

  local task_id, index, attempt = string.match(rollout_id, '^(.+)/(%d+)/(%d+)$')
  local encoded = task_id and redis.call('HGET', groups, task_id)
  if not encoded then return {'ignored'} end
  local group = cjson.decode(encoded)
  local slot = group.slots[tonumber(index) + 1]
  if not slot or slot.state ~= 'leased' or slot.attempt ~= tonumber(attempt) then
    return {'ignored'}
  end
  result = cjson.decode(result)

  local function save() redis.call('HSET', groups, task_id, cjson.encode(group)) end

  -- The reward of all samples of the group, if there are several and they differ by rounding alone:
  -- by a millionth, or by 1e-9 around 0.
  local function common_reward()
    local first, lowest, highest = nil, math.huge, -math.huge
    for _, other in ipairs(group.slots) do
      if other.state == 'done' then
        if other.reward == '' then return nil end
        first = first or other.reward
        lowest = math.min(lowest, tonumber(other.reward))
        highest = math.max(highest, tonumber(other.reward))
      end
    end
    local rounding = math.max(1e-6 * math.max(math.abs(lowest), math.abs(highest)), 1e-9)
    return group.done > 1 and highest - lowest <= rounding and first
  end

  local function complete()
    if group.purpose ~= '1' then
      redis.call('HDEL', groups, task_id)
      return {'complete'}
    end
    local reward = rules.zero_variance_reward ~= '' and common_reward()
    if reward then return discard_group(task_id, group, limits, ZERO_VARIANCE, 'all rewards are ' .. reward) end
    if count_lacking_cells(task_id, group, rules.required_columns) > 0 then
      redis.call('HINCRBY', counters, 'incomplete', 1)
      return {'complete'}
    end
    drop_cells(task_id, group, rules.required_columns)
    redis.call('RPUSH', ready, task_id)
    redis.call('HINCRBY', counters, 'version:ready', 1)
    return {'complete'}
  end

  -- num_samples are done: the group is complete without its other slots.
  local function close_group()
    end_group_leases(task_id, group)
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

  if not result.finished then
    return replace_sample(task_id, tonumber(index), group, limits, result.message, result.cancelled)
  end
  slot.state, slot.reward, slot.rewards = 'done', result.reward, result.rewards
  slot.min_version, slot.samples = result.min_version, result.samples
  group.done = group.done + 1
  if group.done == cjson.decode(redis.call('HGET', tasks, task_id)).num_samples then return close_group() end
  save()
  if group.purpose == '1' then queue_cells(task_id, slot, rules.required_columns) end
  return {'done'}
end

local effects = {}
for i = 4, #ARGV, 3 do table.insert(effects, settle(unpack(ARGV, i, i + 2))) end
return {'ok', effects}
