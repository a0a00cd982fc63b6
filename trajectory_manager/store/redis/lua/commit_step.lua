-- requires: _dead_letters _replay _steps
-- Commits every ledger entry up to a step. ARGV: run_id, step, epoch, trainer_id, max_dead_letters.
-- Without an epoch the trainer takes over (Reconcile): `step` is the one its checkpoint covers; later entries stay,
-- return to the queue, or become dead letters.
-- Returns the samples covered, the epoch, the steps that stay, and which of them is open (0: none).
local config, counters, groups, ready, ledger, commits, trainers =
  KEYS[1], KEYS[2], KEYS[8], KEYS[13], KEYS[14], KEYS[15], KEYS[16]
local order, ended, trained, replay = KEYS[18], KEYS[22], KEYS[23], KEYS[24]
local run_id, step, epoch, trainer_id, max_dead_letters = unpack(ARGV)
local rules = redis.call('GET', config)
if not rules then return {'error', 'UNKNOWN_RUN', run_id} end
rules, step = cjson.decode(rules), tonumber(step)
local counts = redis.call('HMGET', counters, 'epoch', 'committed_step', 'leased_step')
local current = counts[1] or '0'
local committed, leased = tonumber(counts[2] or 0), tonumber(counts[3] or 0)
local takes_over, is_new = epoch == '', false
if takes_over then
  epoch = redis.call('HGET', trainers, trainer_id)
  if not epoch then
    -- At least the time in ms: an epoch that a failover lost is never given out again.
    local time = redis.call('TIME')
    local now = math.floor(time[1] * 1000 + time[2] / 1000)
    epoch, is_new = string.format('%d', math.max(tonumber(current) + 1, now)), true
    redis.call('HSET', trainers, trainer_id, epoch)
  end
end
if takes_over and tonumber(epoch) < tonumber(current) or not takes_over and epoch ~= current then
  return {'error', 'STALE_TRAINER', run_id, epoch, current}
end
if not takes_over and step > leased then return {'error', 'UNKNOWN_STEP', ARGV[2]} end
if not takes_over and step == leased then
  local last = redis.call('HGET', ledger, leased)
  if last and cjson.decode(last).open then
    return {'error', 'OPEN_STEP', ARGV[2], ARGV[2]}
  end
end

-- Records the group's rollouts and which of them were trained, for retention and export.
local function commit_group(task_id, number)
  local group = cjson.decode(redis.call('HGET', groups, task_id))
  local record, counted = {task_id}, {}
  for _, slot in ipairs(group.slots) do
    table.insert(record, slot.attempt)
    table.insert(counted, slot.state == 'done' and slot.attempt or 0)
  end
  redis.call('ZADD', ended, number, cjson.encode(record))
  redis.call('HSET', trained, task_id, number, task_id .. ' attempts', cjson.encode(counted))
  if type(rules.replay) == 'table' then keep_for_replay(replay, rules, task_id, group, number) end
  redis.call('HDEL', groups, task_id)
end

local function dead_letter_step(entry, number)
  local message = string.format('step %d was delivered %d times and never committed', number, entry.deliveries)
  for _, task_id in ipairs(entry.groups) do
    local group = cjson.decode(redis.call('HGET', groups, task_id))
    dead_letter(task_id, group, DELIVERIES, message, step, max_dead_letters)
  end
  uncount_step(entry)
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
    for _, task_id in ipairs(entries[number].groups) do commit_group(task_id, number) end
    if entries[number].open then
      -- A checkpoint covers the step, though the store lost that it was whole.
      redis.call('HSET', counters, 'open_groups', 0)
      redis.call('HINCRBY', counters, 'leased_groups', #entries[number].groups)
    end
    redis.call('HDEL', ledger, number)
  end
end
if found then redis.call('HSET', commits, step, covered) end
local num_samples = tonumber(redis.call('HGET', commits, step) or 0)
if not takes_over then
  redis.call('HSET', counters, 'committed_step', math.max(committed, step))
  return {'ok', num_samples, epoch, {}, 0}
end

-- After a restore no later step stays; none stays after one that was delivered too often.
local last, limit, pending = math.huge, rules.max_deliveries, {}
if step < committed then last = step end
-- Where the last trainer that was given any ended: steps before it were only repeated since the checkpoint.
local suspect, given_last = 0, -1
for _, number in ipairs(numbers) do
  local given_to = tonumber(entries[number].epoch)
  if number > step and given_to >= given_last then suspect, given_last = number, given_to end
end
for _, number in ipairs(numbers) do
  local entry = entries[number]
  if number > step and number <= last then
    if is_new and limit > 0 and number == suspect and entry.deliveries >= limit then
      dead_letter_step(entry, number)
      redis.call('HDEL', ledger, number)
      last = number
    else
      table.insert(pending, number)
    end
  end
end
for i = #numbers, 1, -1 do
  if numbers[i] > last then
    return_step(entries[numbers[i]])
    redis.call('HDEL', ledger, numbers[i])
  end
end
leased = pending[#pending] or step
redis.call('HSET', counters, 'epoch', epoch, 'committed_step', step, 'leased_step', leased)
if is_new then redis.call('HSET', counters, 'training', 0) end
-- A trainer starts an ended run again.
if redis.call('HDEL', counters, 'ended') == 1 then redis.call('HINCRBY', counters, 'version:tasks', 1) end
redis.call('HINCRBY', counters, 'version:ready', 1)
local newest = entries[leased]
return {'ok', num_samples, epoch, pending, #pending > 0 and newest.open and leased or 0}
