-- Queues all new tasks, or none. ARGV: run_id, max_queued, then task_id, purpose, task for each.
local config, counters, tasks = KEYS[1], KEYS[2], KEYS[3]
local queues = {['1'] = KEYS[4], ['2'] = KEYS[5]}
if redis.call('EXISTS', config) == 0 then return {'refused', 'UNKNOWN_RUN', ARGV[1]} end
local new, position = {}, {}
for i = 3, #ARGV, 3 do
  local task_id, task = ARGV[i], ARGV[i + 2]
  local known = redis.call('HGET', tasks, task_id) or (position[task_id] and ARGV[position[task_id] + 2])
  if not known then
    position[task_id] = i
    table.insert(new, i)
  elseif known ~= task then
    return {'refused', 'OTHER_TASK', task_id}
  end
end
-- Each purpose has a queue and a bound of its own: tasks to train on never keep evaluations out.
local free = tonumber(ARGV[2])
for purpose, queue in pairs(queues) do
  local asked, wanted = #ARGV == 2 and purpose == '1', 0
  for i = 3, #ARGV, 3 do asked = asked or ARGV[i + 1] == purpose end
  for _, i in ipairs(new) do
    if ARGV[i + 1] == purpose then wanted = wanted + 1 end
  end
  local left = tonumber(ARGV[2]) - redis.call('LLEN', queue)
  if wanted > left then
    return {'refused', 'FULL_QUEUE', string.format('%d', wanted), string.format('%d', math.max(0, left))}
  end
  if asked then free = math.min(free, left - wanted) end
end
for _, i in ipairs(new) do
  redis.call('HSET', tasks, ARGV[i], ARGV[i + 2])
  redis.call('RPUSH', queues[ARGV[i + 1]], ARGV[i])
end
if #new > 0 then redis.call('HINCRBY', counters, 'version:tasks', 1) end
return {'ok', #new, free}
