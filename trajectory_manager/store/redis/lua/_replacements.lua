-- Failed samples, and groups that leave without being trained. Needs _dead_letters and _cell_queue.

-- The lease of a rollout can no longer be proved, nor asked for again.
local function end_nonce(rollout_id)
  local nonces = KEYS[10]
  local nonce = redis.call('HGET', nonces, rollout_id)
  if nonce then redis.call('HDEL', nonces, rollout_id, nonce) end
end

-- The group needs no running rollout any more: the sweep finishes them.
local function end_group_leases(task_id, group)
  for i, slot in ipairs(group.slots) do
    local name = string.format('%s/%d/%d', task_id, i - 1, slot.attempt)
    redis.call('ZADD', KEYS[9], 'XX', 0, name)
    end_nonce(name)
  end
end

-- `limits`: required_columns, max_replacements and max_dead_letters.
local function discard_group(task_id, group, limits, reason, message)
  end_group_leases(task_id, group)
  drop_cells(task_id, group, limits.required_columns)
  local committed = redis.call('HGET', KEYS[2], 'committed_step') or 0
  dead_letter(task_id, group, reason, message, committed, limits.max_dead_letters)
  if group.purpose == '1' then redis.call('HINCRBY', KEYS[2], 'discarded', 1) end
  redis.call('HINCRBY', KEYS[2], 'version:tasks', 1)
  redis.call('HINCRBY', KEYS[2], 'version:ready', 1)
  return {'discarded', reason}
end

-- Opens a slot of the group again, for another sample; a group that has had too many is discarded. Index from 0.
-- One that was cancelled is not counted for the run: nothing has failed.
local function replace_sample(task_id, index, group, limits, message, cancelled)
  group.replaced = group.replaced + 1
  if not cancelled then redis.call('HINCRBY', KEYS[2], 'replaced', 1) end
  if group.replaced > limits.max_replacements then
    return discard_group(task_id, group, limits, FAILURES, message)
  end
  group.slots[index + 1] = {attempt = group.slots[index + 1].attempt, state = 'open'}
  redis.call('HSET', KEYS[8], task_id, cjson.encode(group))
  local open_slots = group.purpose == '1' and KEYS[6] or KEYS[7]
  -- An agent's own group is leased by its name.
  if not group.own then redis.call('LPUSH', open_slots, task_id .. '/' .. index) end
  redis.call('HINCRBY', KEYS[2], 'version:tasks', 1)
  return {'replaced'}
end
