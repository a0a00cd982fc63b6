-- requires: _dead_letters _replay _stale_groups _steps
-- Writes the ledger entry of a step, lets an open one grow, or returns the existing one.
-- ARGV: run_id, epoch, step, base_version, num_groups, min_groups, streaming (0/1), max_dead_letters.
-- Returns the number of groups that were too old, and the entry if there is one.
local config, counters, groups, ready, ledger, order, replay =
  KEYS[1], KEYS[2], KEYS[8], KEYS[13], KEYS[14], KEYS[18], KEYS[24]
local run_id, epoch, step, base, num_groups, min_groups, streaming, max_dead_letters = unpack(ARGV)
local rules = redis.call('GET', config)
if not rules then return {'error', 'UNKNOWN_RUN', run_id} end
local current = redis.call('HGET', counters, 'epoch') or '0'
if current ~= epoch then return {'error', 'STALE_TRAINER', run_id, epoch, current} end
streaming = streaming == '1'

local known = redis.call('HGET', ledger, step)
local entry = known and cjson.decode(known)
if entry then
  if entry.epoch ~= epoch then
    entry.deliveries, entry.epoch = entry.deliveries + 1, epoch
    redis.call('HSET', ledger, step, cjson.encode(entry))
  end
  if not entry.open then return {'ok', 0, cjson.encode(entry)} end
else
  local leased = redis.call('HGET', counters, 'leased_step') or '0'
  local last = redis.call('HGET', ledger, leased)
  if last and cjson.decode(last).open then return {'error', 'OPEN_STEP', step, leased} end
  if tonumber(step) ~= tonumber(leased) + 1 then
    return {'error', 'STEP_ORDER', step, string.format('%d', tonumber(leased) + 1)}
  end
  entry = {
    groups = {}, samples = {}, replayed = {}, base = tonumber(base), deliveries = 1, epoch = epoch, open = true
  }
end
rules = cjson.decode(rules)
num_groups, min_groups = tonumber(num_groups), tonumber(min_groups)
if num_groups == 0 then num_groups = rules.groups_per_step end
if min_groups == 0 then min_groups = num_groups end
local bound = rules.groups_per_step * (rules.max_staleness + 1)
if rules.fifo_window > 0 then bound = math.min(bound, rules.fifo_window) end
if num_groups > bound then
  return {'error', 'TOO_MANY_GROUPS', ARGV[5], string.format('%d', bound)}
end
if min_groups > num_groups then
  return {'error', 'MINIMUM_ABOVE', ARGV[6], string.format('%d', num_groups)}
end
step, base = tonumber(step), entry.base
local replays = type(rules.replay) == 'table' and rules.replay
local REWARD = 2

-- The groups this call adds to the step, in order, and the same as a set.
local fresh, taken = {}, {}
-- With a fifo_window: the complete groups by completion, and the first groups by admission as a set.
-- The groups of an open step stay in its window.
local window, complete_groups, inside = rules.fifo_window, {}, {}
if window > 0 then
  window, complete_groups = window - #entry.groups, redis.call('LRANGE', ready, 0, -1)
end

local function read_window()
  inside = {}
  if window == 0 then return end
  for _, task_id in ipairs(redis.call('ZRANGE', order, 0, window - 1)) do inside[task_id] = true end
end

local function next_group()
  if rules.fifo_window == 0 then return redis.call('LINDEX', ready, #fresh) end
  for i, task_id in ipairs(complete_groups) do
    if inside[task_id] and not taken[task_id] then return task_id, i end
  end
end

-- Appends the names of the group's samples to a list.
local function add_samples(group, names)
  for _, slot in ipairs(group.slots) do
    for _, name in ipairs(slot.state == 'done' and slot.samples or {}) do table.insert(names, name) end
  end
end

-- The groups kept for replay; drops the oldest beyond the capacity.
local function replay_buffer()
  local found, stored = {}, redis.call('HGETALL', replay)
  for i = 1, #stored, 2 do
    local number, mean, begin = string.match(stored[i + 1], '^(%d+) (%S+) ()')
    found[(i + 1) / 2] = {
      task_id = stored[i], step = tonumber(number), reward = tonumber(mean),
      kept = stored[i + 1], begin = begin
    }
  end
  if #found <= replays.capacity_groups then return found end
  table.sort(found, function(a, b)
    if a.step ~= b.step then return a.step > b.step end
    return a.task_id > b.task_id
  end)
  while #found > replays.capacity_groups do
    redis.call('HDEL', replay, table.remove(found).task_id)
  end
  return found
end

-- Weighted draw without replacement: the greatest log-weights plus Gumbel noise. The test oracle has it in Python.
local function draw_replay()
  local found, highest = {}, -math.huge
  for _, group in ipairs(replay_buffer()) do
    local has_weight = replays.strategy ~= REWARD or group.reward
    if has_weight and not taken[group.task_id] then
      highest = math.max(highest, group.reward or 0)
      table.insert(found, group)
    end
  end
  for _, group in ipairs(found) do
    local digest = redis.sha1hex(string.format('%s %d %s', run_id, step, group.task_id))
    local uniform = (tonumber(string.sub(digest, 1, 13), 16) + 0.5) / 16 ^ 13
    local weight = -math.log(1 + math.max(0, step - group.step))
    if replays.strategy == REWARD then weight = (group.reward - highest) / replays.temperature end
    group.rank = weight - math.log(-math.log(uniform))
  end
  table.sort(found, function(a, b)
    if a.rank ~= b.rank then return a.rank > b.rank end
    return a.task_id < b.task_id
  end)
  return found
end

local too_old, had = 0, #entry.groups
read_window()
while had + #fresh < num_groups do
  local task_id, position = next_group()
  if not task_id then break end
  local group = cjson.decode(redis.call('HGET', groups, task_id))
  if is_too_old(rules, group, base) then
    too_old = too_old + 1
    dead_letter_stale(rules, task_id, group, step, base, max_dead_letters)
    if position then table.remove(complete_groups, position) end
    read_window()
  else
    table.insert(fresh, task_id)
    taken[task_id] = true
  end
end
local number = had + #fresh
local whole = number >= min_groups
local grown = whole or (streaming and #fresh > 0)
if too_old > 0 then redis.call('HINCRBY', counters, 'version:ready', 1) end
if too_old > 0 or whole then redis.call('HINCRBY', counters, 'version:tasks', 1) end
if not whole then record_awaited_step(counters, string.format('%d', base)) end
if not grown and known then return {'ok', too_old, cjson.encode(entry)} end
if not grown then return {'ok', too_old} end

for _, task_id in ipairs(fresh) do
  local group = cjson.decode(redis.call('HGET', groups, task_id))
  table.insert(entry.groups, task_id)
  add_samples(group, entry.samples)
  redis.call('LREM', ready, 1, task_id)
  redis.call('ZREM', order, task_id)
end
redis.call('HINCRBY', counters, 'open_groups', #fresh)
if whole then
  for _, task_id in ipairs(entry.groups) do taken[task_id] = true end
  local drawn = replays and draw_replay() or {}
  for i = 1, math.min(#drawn, replays and replays.groups_per_step or 0) do
    add_samples(cjson.decode(string.sub(drawn[i].kept, drawn[i].begin)), entry.replayed)
  end
  -- Admission reopens only when the step is whole: what starts now is for later steps, as without streaming.
  redis.call('HSET', counters, 'open_groups', 0)
  redis.call('HINCRBY', counters, 'leased_groups', number)
  -- Only of a trainer that reports when it waits is it known that it trains until then.
  if redis.call('HGET', counters, 'reporting_epoch') == epoch then
    redis.call('HSET', counters, 'training', 1, 'next_base', string.format('%d', base + 1))
  end
  entry.open, entry.streamed = nil, streaming or nil
end
redis.call('HSET', ledger, step, cjson.encode(entry))
redis.call('HSET', counters, 'leased_step', step)
return {'ok', too_old, cjson.encode(entry)}
