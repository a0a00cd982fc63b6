-- Tells a group how one of its rollouts ended. Idempotent: only the leased attempt of a slot counts.
-- ARGV: run_id, rollout_id, finished (0/1), reward or '', min_version, max_replacements, sample_id...
-- Answers the effect and, for a discarded group, the reason.
local config, counters, groups, leases, nonces, marks, ready =
  KEYS[1], KEYS[2], KEYS[8], KEYS[9], KEYS[10], KEYS[11], KEYS[13]
local open = {['1'] = KEYS[6], ['2'] = KEYS[7]}
local run_id, rollout_id, finished, reward, min_version, max_replacements = unpack(ARGV)
local rules = redis.call('GET', config)
if not rules then return {'refused', 'UNKNOWN_RUN', run_id} end

local function end_lease(name)
  redis.call('ZREM', leases, name)
  redis.call('HDEL', nonces, name)
end
redis.call('ZREM', marks, rollout_id)
end_lease(rollout_id)

local task_id, index, attempt = string.match(rollout_id, '^(.+)/(%d+)/(%d+)$')
local encoded = task_id and redis.call('HGET', groups, task_id)
if not encoded then return {'ok', 'ignored', ''} end
local group = cjson.decode(encoded)
local slot = group.slots[tonumber(index) + 1]
if not slot or slot.state ~= 'leased' or slot.attempt ~= tonumber(attempt) then
  return {'ok', 'ignored', ''}
end

local function discard(reason)
  redis.call('HDEL', groups, task_id)
  if group.purpose == '1' then redis.call('HINCRBY', counters, 'discarded', 1) end
  for i, other in ipairs(group.slots) do
    end_lease(string.format('%s/%d/%d', task_id, i - 1, other.attempt))
  end
  redis.call('HINCRBY', counters, 'version:tasks', 1)
  redis.call('HINCRBY', counters, 'version:ready', 1)
  return {'ok', 'discarded', reason}
end

local function save() redis.call('HSET', groups, task_id, cjson.encode(group)) end

local function replace()
  group.replaced = group.replaced + 1
  redis.call('HINCRBY', counters, 'replaced', 1)
  if group.replaced > tonumber(max_replacements) then return discard('failures') end
  slot.state = 'open'
  save()
  redis.call('LPUSH', open[group.purpose], task_id .. '/' .. index)
  redis.call('HINCRBY', counters, 'version:tasks', 1)
  return {'ok', 'replaced', ''}
end

local function same_reward()
  if cjson.decode(rules).zero_variance_reward == '' or #group.slots < 2 then return false end
  for _, other in ipairs(group.slots) do
    if other.reward == '' or other.reward ~= group.slots[1].reward then return false end
  end
  return true
end

local function complete()
  if group.purpose ~= '1' then
    redis.call('HDEL', groups, task_id)
    return {'ok', 'complete', ''}
  end
  if same_reward() then return discard('zero_variance') end
  group.min_version = group.slots[1].min_version
  for _, other in ipairs(group.slots) do
    group.min_version = math.min(group.min_version, other.min_version)
  end
  save()
  redis.call('RPUSH', ready, task_id)
  redis.call('HINCRBY', counters, 'version:ready', 1)
  return {'ok', 'complete', ''}
end

if finished ~= '1' then return replace() end
slot.state, slot.reward, slot.min_version, slot.samples = 'done', reward, tonumber(min_version), {}
for i = 7, #ARGV do table.insert(slot.samples, ARGV[i]) end
group.done = group.done + 1
if group.done == #group.slots then return complete() end
save()
return {'ok', 'done', ''}
