-- The trainer's next step, as admission knows it.

-- The trainer waits for a step that starts from weight version `base` (a decimal string).
local function record_awaited_step(counters, base)
  local known = redis.call('HMGET', counters, 'training', 'next_base')
  if known[1] == '1' or (known[2] or '0') ~= base then
    redis.call('HSET', counters, 'training', 0, 'next_base', base)
    redis.call('HINCRBY', counters, 'version:tasks', 1)
  end
end
