-- Writes the ledger entry of a step, lets an open one grow, or answers the one that is there.
-- ARGV: run_id, epoch, step, base_version, num_groups, min_groups, num_shards, streaming,
-- max_dead_letters. Answers the number of groups too old, and the entry.
local config, counters, groups, ready, ledger, dead, order, replay =
  KEYS[1], KEYS[2], KEYS[8], KEYS[13], KEYS[14], KEYS[17], KEYS[18], KEYS[24]
local run_id, epoch, step, base, wanted, least, shards, streaming, max_dead_letters = unpack(ARGV)
local rules = redis.call('GET', config)
if not rules then return {'refused', 'UNKNOWN_RUN', run_id} end
local current = redis.call('HGET', counters, 'epoch') or '0'
if current ~= epoch then return {'refused', 'STALE_TRAINER', run_id, epoch, current} end
streaming = streaming == '1'
if streaming and shards ~= '1' then return {'refused', 'STREAMED_SHARDS', shards} end

local known = redis.call('HGET', ledger, step)
local entry = known and cjson.decode(known)
if entry then
  local stored = string.format('%d', entry.shards)
  if stored ~= shards then return {'refused', 'OTHER_SHARDS', step, stored, shards} end
  if entry.epoch ~= epoch then
    entry.deliveries, entry.epoch = entry.deliveries + 1, epoch
    redis.call('HSET', ledger, step, cjson.encode(entry))
  end
  if not entry.open then return {'ok', 0, cjson.encode(entry)} end
else
  local leased = redis.call('HGET', counters, 'leased') or '0'
  local last = redis.call('HGET', ledger, leased)
  if last and cjson.decode(last).open then return {'refused', 'OPEN_STEP', step, leased} end
  if tonumber(step) ~= tonumber(leased) + 1 then
    return {'refused', 'STEP_ORDER', step, string.format('%d', tonumber(leased) + 1)}
  end
  entry = {
    groups = {}, samples = {}, replayed = {}, tokens = {}, base = tonumber(base),
    shards = tonumber(shards), deliveries = 1, epoch = epoch, open = true
  }
end
rules = cjson.decode(rules)
wanted, least = tonumber(wanted), tonumber(least)
if wanted == 0 then wanted = rules.groups_per_step end
if least == 0 then least = wanted end
local bound = rules.groups_per_step * (rules.max_staleness + 1)
if rules.fifo_window > 0 then bound = math.min(bound, rules.fifo_window) end
if wanted > bound then
  return {'refused', 'TOO_MANY_GROUPS', ARGV[5], string.format('%d', bound)}
end
if least > wanted then
  return {'refused', 'MINIMUM_ABOVE', ARGV[6], string.format('%d', wanted)}
end
step, base = tonumber(step), entry.base
local replays = type(rules.replay) == 'table' and rules.replay
local MASK, WITHHOLD, DROPPED, WITHHELD, REWARD = 3, 4, 2, 3, 2

-- The groups this step takes, in order, and the same as a set.
local fresh, taken = {}, {}
-- With a window: the complete groups by completion, and the first groups by admission as a set. What
-- an open step has stays in its window.
local window, waiting, inside = rules.fifo_window, {}, {}
if window > 0 then
  window, waiting = window - #entry.groups, redis.call('LRANGE', ready, 0, -1)
end

local function look()
  inside = {}
  if window == 0 then return end
  for _, task_id in ipairs(redis.call('ZRANGE', order, 0, window - 1)) do inside[task_id] = true end
end

local function next_group()
  if window == 0 then return redis.call('LINDEX', ready, #fresh) end
  for i, task_id in ipairs(waiting) do
    if inside[task_id] and not taken[task_id] then return task_id, i end
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

local function bury(task_id, group)
  local withheld = rules.staleness_policy == WITHHOLD
  local time, attempts, made = redis.call('TIME'), {}, {task_id}
  for i, slot in ipairs(group.slots) do attempts[i], made[i + 1] = slot.attempt, slot.attempt end
  redis.call('RPUSH', dead, cjson.encode({
    task_id = task_id, reason = withheld and WITHHELD or DROPPED, attempts = attempts,
    message = string.format(
      '%d versions old for step %d: its oldest token has %d, the step begins with %d',
      base - group.min_version, step, group.min_version, base),
    time = time[1] + time[2] / 1000000
  }))
  redis.call('LTRIM', dead, -max_dead_letters, -1)
  redis.call('ZADD', KEYS[22], redis.call('HGET', counters, 'committed') or 0, cjson.encode(made))
  if withheld and replays then keep(task_id, group, step) end
end

local function leave_behind(task_id, group, position)
  bury(task_id, group)
  redis.call('LREM', ready, 1, task_id)
  redis.call('ZREM', order, task_id)
  redis.call('HDEL', groups, task_id)
  redis.call('HINCRBY', counters, 'discarded', 1)
  if position then table.remove(waiting, position) end
  look()
end

-- Adds the names and lengths of the group's samples to two lists.
local function add_samples(group, names, tokens)
  for _, slot in ipairs(group.slots) do
    for i, name in ipairs(slot.state == 'done' and slot.samples or {}) do
      table.insert(names, name)
      table.insert(tokens, slot.tokens[i])
    end
  end
end

-- The groups that may be replayed; the oldest of those beyond the capacity leave.
local function kept()
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

-- Weighted draw without replacement: the greatest log-weights plus Gumbel noise. See replay.py.
local function drawn()
  local found, highest = {}, -math.huge
  for _, group in ipairs(kept()) do
    local weighed = replays.strategy ~= REWARD or group.reward
    if weighed and not taken[group.task_id] then
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
look()
while had + #fresh < wanted do
  local task_id, position = next_group()
  if not task_id then break end
  local group = cjson.decode(redis.call('HGET', groups, task_id))
  if rules.staleness_policy == MASK or base - group.min_version <= rules.max_staleness then
    table.insert(fresh, task_id)
    taken[task_id] = true
  else
    too_old = too_old + 1
    leave_behind(task_id, group, position)
  end
end
local number = had + #fresh
local complete = number >= least
local grown = complete or (streaming and #fresh > 0)
if too_old > 0 then redis.call('HINCRBY', counters, 'version:ready', 1) end
if too_old > 0 or complete then redis.call('HINCRBY', counters, 'version:tasks', 1) end
if not complete then
  -- As in await_step.
  local awaited = redis.call('HMGET', counters, 'training', 'next_base')
  local wanted_base = string.format('%d', base)
  if awaited[1] == '1' or (awaited[2] or '0') ~= wanted_base then
    redis.call('HSET', counters, 'training', 0, 'next_base', wanted_base)
    redis.call('HINCRBY', counters, 'version:tasks', 1)
  end
end
if not grown and known then return {'ok', too_old, cjson.encode(entry)} end
if not grown then return {'ok', too_old} end

for _, task_id in ipairs(fresh) do
  local group = cjson.decode(redis.call('HGET', groups, task_id))
  table.insert(entry.groups, task_id)
  add_samples(group, entry.samples, entry.tokens)
  redis.call('LREM', ready, 1, task_id)
  redis.call('ZREM', order, task_id)
end
redis.call('HINCRBY', counters, 'open', #fresh)
if complete then
  for _, task_id in ipairs(entry.groups) do taken[task_id] = true end
  local again = replays and drawn() or {}
  for i = 1, math.min(#again, replays and replays.groups_per_step or 0) do
    add_samples(cjson.decode(string.sub(again[i].kept, again[i].begin)), entry.replayed, entry.tokens)
  end
  -- Only now admission lets others in: what they sample is for later steps, as without streaming.
  redis.call('HSET', counters, 'open', 0)
  redis.call('HINCRBY', counters, 'taken', number)
  -- Of a trainer that does not tell when it waits again nothing is assumed.
  if redis.call('HGET', counters, 'tells') == epoch then
    redis.call('HSET', counters, 'training', 1, 'next_base', string.format('%d', base + 1))
  end
  entry.open = nil
end
redis.call('HSET', ledger, step, cjson.encode(entry))
redis.call('HSET', counters, 'leased', step)
return {'ok', too_old, cjson.encode(entry)}
