-- Consumes every entry up to a step for good.
-- ARGV: run_id, step, epoch, trainer_id, max_dead_letters. Without an epoch the trainer takes over:
-- the step is what its checkpoint covers; later entries stay, return to the queue, or die.
-- Answers the samples covered, the epoch, the steps that stay, and which of them is open (0: none).
local config, counters, groups, ready, ledger, commits, trainers =
  KEYS[1], KEYS[2], KEYS[8], KEYS[13], KEYS[14], KEYS[15], KEYS[16]
local dead, order, trained, steps, replay = KEYS[17], KEYS[18], KEYS[22], KEYS[23], KEYS[24]
local run_id, step, epoch, trainer_id, max_dead_letters = unpack(ARGV)
local DELIVERIES = 5
local rules = redis.call('GET', config)
if not rules then return {'refused', 'UNKNOWN_RUN', run_id} end
rules, step = cjson.decode(rules), tonumber(step)
local counts = redis.call('HMGET', counters, 'epoch', 'committed', 'leased')
local current = counts[1] or '0'
local committed, leased = tonumber(counts[2] or 0), tonumber(counts[3] or 0)
local takes_over, is_new = epoch == '', false
if takes_over then
  epoch = redis.call('HGET', trainers, trainer_id)
  if not epoch then
    -- Not before the time in ms: an epoch given out and then lost by the store is not given again.
    local time = redis.call('TIME')
    local now = math.floor(time[1] * 1000 + time[2] / 1000)
    epoch, is_new = string.format('%d', math.max(tonumber(current) + 1, now)), true
    redis.call('HSET', trainers, trainer_id, epoch)
  end
end
if takes_over and tonumber(epoch) < tonumber(current) or not takes_over and epoch ~= current then
  return {'refused', 'STALE_TRAINER', run_id, epoch, current}
end
if not takes_over and step > leased then return {'refused', 'UNKNOWN_STEP', ARGV[2]} end
if not takes_over and step == leased then
  local last = redis.call('HGET', ledger, leased)
  if last and cjson.decode(last).open then
    return {'refused', 'OPEN_STEP', ARGV[2], ARGV[2]}
  end
end

-- Keeps a group for replay as "step mean_reward {group}", the mean "-" if it has no such reward.
local function keep(task_id, group, number)
  local sum, count = 0, 0
  for _, slot in ipairs(group.slots) do
    local reward = slot.state == 'done' and slot.rewards and slot.rewards[rules.replay.reward_name]
    if reward then sum, count = sum + tonumber(reward), count + 1 end
  end
  local mean = count > 0 and string.format('%.17g', sum / count) or '-'
  local kept = string.format('%d %s %s', number, mean, cjson.encode(group))
  redis.call('HSET', replay, task_id, kept)
end

-- Which rollouts were made for the group and which of them were trained: for retention and export.
local function remember(task_id, number)
  local group = cjson.decode(redis.call('HGET', groups, task_id))
  local made, counted = {task_id}, {}
  for i, slot in ipairs(group.slots) do
    table.insert(made, slot.attempt)
    table.insert(counted, slot.state == 'done' and slot.attempt or 0)
  end
  redis.call('ZADD', trained, number, cjson.encode(made))
  redis.call('HSET', steps, task_id, number, task_id .. ' attempts', cjson.encode(counted))
  if type(rules.replay) == 'table' then keep(task_id, group, number) end
  redis.call('HDEL', groups, task_id)
end

-- Groups of an open step are not counted as taken yet.
local function untake(entry)
  if entry.open then
    redis.call('HSET', counters, 'open', 0)
  else
    redis.call('HINCRBY', counters, 'taken', -#entry.groups)
  end
end

local function give_back(entry)
  for i = #entry.groups, 1, -1 do
    local task_id = entry.groups[i]
    local group = cjson.decode(redis.call('HGET', groups, task_id))
    redis.call('LPUSH', ready, task_id)
    if group.admission then redis.call('ZADD', order, group.admission, task_id) end
  end
  untake(entry)
end

local function bury(entry, number)
  local time = redis.call('TIME')
  for _, task_id in ipairs(entry.groups) do
    local attempts, made = {}, {task_id}
    for i, slot in ipairs(cjson.decode(redis.call('HGET', groups, task_id)).slots) do
      attempts[i], made[i + 1] = slot.attempt, slot.attempt
    end
    redis.call('RPUSH', dead, cjson.encode({
      task_id = task_id, reason = DELIVERIES, attempts = attempts,
      message = string.format(
        'step %d was delivered %d times and never committed', number, entry.deliveries),
      time = time[1] + time[2] / 1000000
    }))
    redis.call('ZADD', trained, step, cjson.encode(made))
    redis.call('HDEL', groups, task_id)
  end
  redis.call('LTRIM', dead, -max_dead_letters, -1)
  untake(entry)
  redis.call('HINCRBY', counters, 'discarded', #entry.groups)
  redis.call('HINCRBY', counters, 'version:tasks', 1)
end

local entries, numbers, covered, found = {}, {}, 0, false
for _, known in ipairs(redis.call('HKEYS', ledger)) do table.insert(numbers, tonumber(known)) end
table.sort(numbers)
for _, number in ipairs(numbers) do
  entries[number] = cjson.decode(redis.call('HGET', ledger, number))
  if number <= step then
    covered, found = covered + #entries[number].samples, true
    for _, task_id in ipairs(entries[number].groups) do remember(task_id, number) end
    if entries[number].open then
      -- The store lost that it was completed, but a checkpoint covers it.
      redis.call('HSET', counters, 'open', 0)
      redis.call('HINCRBY', counters, 'taken', #entries[number].groups)
    end
    redis.call('HDEL', ledger, number)
  end
end
if found then redis.call('HSET', commits, step, covered) end
local num_samples = tonumber(redis.call('HGET', commits, step) or 0)
if not takes_over then
  redis.call('HSET', counters, 'committed', math.max(committed, step))
  return {'ok', num_samples, epoch, {}, 0}
end

-- After a restore no later step stays; none stays behind one that was delivered too often.
local last, limit, pending = math.huge, rules.max_deliveries, {}
if step < committed then last = step end
for _, number in ipairs(numbers) do
  local entry = entries[number]
  if number > step and number <= last then
    if is_new and limit > 0 and (entry.deliveries) >= limit then
      bury(entry, number)
      redis.call('HDEL', ledger, number)
      last = number
    else
      table.insert(pending, number)
    end
  end
end
for i = #numbers, 1, -1 do
  if numbers[i] > last then
    give_back(entries[numbers[i]])
    redis.call('HDEL', ledger, numbers[i])
  end
end
leased = pending[#pending] or step
redis.call('HSET', counters, 'epoch', epoch, 'committed', step, 'leased', leased)
if is_new then redis.call('HSET', counters, 'training', 0) end
redis.call('HINCRBY', counters, 'version:ready', 1)
local newest = entries[leased]
return {'ok', num_samples, epoch, pending, #pending > 0 and newest.open and leased or 0}
