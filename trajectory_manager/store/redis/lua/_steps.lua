-- Steps of the trainer, as the ledger and admission know them.

-- The trainer waits for a step that starts from weight version `base` (a decimal string).
local function record_awaited_step(counters, base)
  local known = redis.call('HMGET', counters, 'training', 'next_base')
  if known[1] == '1' or (known[2] or '0') ~= base then
    redis.call('HSET', counters, 'training', 0, 'next_base', base)
    redis.call('HINCRBY', counters, 'version:tasks', 1)
  end
end

-- Admission counts the groups of a whole step as leased, those of an open one not yet.
local function uncount_step(entry)
  if entry.open then
    redis.call('HSET', KEYS[2], 'open_groups', 0)
  else
    redis.call('HINCRBY', KEYS[2], 'leased_groups', -#entry.groups)
  end
end

-- Returns the groups of a step to the head of the queue.
local function return_step(entry)
  local groups, ready, order = KEYS[8], KEYS[13], KEYS[18]
  for i = #entry.groups, 1, -1 do
    local task_id = entry.groups[i]
    local group = cjson.decode(redis.call('HGET', groups, task_id))
    redis.call('LPUSH', ready, task_id)
    redis.call('ZADD', order, group.admission, task_id)
  end
  uncount_step(entry)
end
