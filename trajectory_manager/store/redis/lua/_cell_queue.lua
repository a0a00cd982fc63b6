-- Cells of a group's samples, from the end of a sample's rollout until the group is ready or discarded.
-- A queue has the cells of complete groups first: what is scored ahead of them delays no group, and a group that is
-- discarded later cost only time that was left. Among them, and among the others, the oldest is first.

local function next_cell_number(is_complete)
  return string.format('%d%011d', is_complete and 0 or 1, redis.call('HINCRBY', KEYS[2], 'column_samples', 1))
end

-- Queues a cell for each required column of a slot's samples, unless there is one. A group that is not complete counts
-- as lacking one cell more, so that the last written cell of the samples it has does not make it ready.
local function queue_cells(task_id, slot, columns)
  local cells, queue = KEYS[19], KEYS[20]
  for _, sample in ipairs(#columns > 0 and slot.samples or {}) do
    if redis.call('HEXISTS', cells, columns[1] .. ' ' .. sample) == 0 then
      local number = next_cell_number(false)
      for _, column in ipairs(columns) do
        redis.call('HSET', cells, column .. ' ' .. sample, number)
        redis.call('ZADD', queue, 0, column .. ' ' .. number .. ' ' .. sample)
      end
      redis.call('HSETNX', cells, task_id, 1)
      redis.call('HINCRBY', cells, task_id, #columns)
      redis.call('HINCRBY', KEYS[2], 'version:columns', 1)
    end
  end
end

-- Moves what is not written of a sample behind the cells of the groups that are complete already.
local function move_ahead(sample, columns)
  local cells, queue, number = KEYS[19], KEYS[20], next_cell_number(true)
  for _, column in ipairs(columns) do
    local field = column .. ' ' .. sample
    local before, holder = string.match(redis.call('HGET', cells, field), '^(%d+)(.*)$')
    if before then redis.call('HSET', cells, field, number .. holder) end
    if before and redis.call('ZREM', queue, column .. ' ' .. before .. ' ' .. sample) == 1 then
      redis.call('ZADD', queue, 0, column .. ' ' .. number .. ' ' .. sample)
    end
  end
end

-- The group is complete: returns how many cells it lacks. Those of samples that a manager of release 0.2 settled are
-- queued only now.
local function count_lacking_cells(task_id, group, columns)
  for _, slot in ipairs(group.slots) do queue_cells(task_id, slot, columns) end
  if redis.call('HEXISTS', KEYS[19], task_id) == 0 then return 0 end
  for _, slot in ipairs(group.slots) do
    for _, sample in ipairs(slot.samples or {}) do move_ahead(sample, columns) end
  end
  return redis.call('HINCRBY', KEYS[19], task_id, -1)
end

-- Deletes the cells of a slot's samples; returns how many were not written.
local function drop_cells_of_slot(slot, columns)
  local cells, queue, leases, dropped = KEYS[19], KEYS[20], KEYS[21], 0
  for _, sample in ipairs(slot.samples or {}) do
    for _, column in ipairs(columns) do
      local field = column .. ' ' .. sample
      local number = string.match(redis.call('HGET', cells, field) or '', '^%d+')
      if number then
        redis.call('ZREM', queue, column .. ' ' .. number .. ' ' .. sample)
        dropped = dropped + 1
      end
      redis.call('ZREM', leases, field)
      redis.call('HDEL', cells, field, 'tries ' .. field)
    end
  end
  return dropped
end

-- Deletes the cells of a group: it is ready, or discarded.
local function drop_cells(task_id, group, columns)
  redis.call('HDEL', KEYS[19], task_id)
  for _, slot in ipairs(#columns > 0 and group.slots or {}) do drop_cells_of_slot(slot, columns) end
end
