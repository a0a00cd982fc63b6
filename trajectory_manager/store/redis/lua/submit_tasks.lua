-- Queues all tasks that are new, or none. ARGV: run_id, max_queued, then task_id, purpose, task of each.
-- Returns how many were new, and how many more the queue takes.
local config, counters, tasks = KEYS[1], KEYS[2], KEYS[3]
local queues = {['1'] = KEYS[4], ['2'] = KEYS[5]}
if redis.call('EXISTS', config) == 0 then return {'error', 'UNKNOWN_RUN', ARGV[1]} end
local new, position = {}, {}
for i = 3, #ARGV, 3 do
  local task_id, task = ARGV[i], ARGV[i + 2]
  local known = redis.call('HGET', tasks, task_id) or (position[task_id] and ARGV[position[task_id] + 2])
  if not known then
    position[task_id] = i
    table.insert(new, i)
  elseif known ~= task then
    return {'error', 'OTHER_TASK', task_id}
  end
end
-- Each purpose has its own queue and bound: TRAIN tasks never keep EVAL tasks out.
local free = tonumber(ARGV[2])
for purpose, queue in pairs(queues) do
  local is_given, num_new = #ARGV == 2 and purpose == '1', 0
  for i = 3, #ARGV, 3 do is_given = is_given or ARGV[i + 1] == purpose end
  for _, i in ipairs(new) do
    if ARGV[i + 1] == purpose then num_new = num_new + 1 end
  end
  local left = tonumber(ARGV[2]) - redis.call('LLEN', queue)
  if num_new > left then
    return {'error', 'FULL_QUEUE', string.format('%d', num_new), string.format('%d', math.max(0, left))}
  end
  if is_given then free = math.min(free, left - num_new) end
end
for _, i in ipairs(new) do
  redis.call('HSET', tasks, ARGV[i], ARGV[i + 2])
  redis.call('RPUSH', queues[ARGV[i + 1]], ARGV[i])
end
if #new > 0 then redis.call('HINCRBY', counters, 'version:tasks', 1) end
return {'ok', #new, free}
