-- Writes the ledger entry of a step, or answers the one that is there.
-- ARGV: run_id, epoch, step, base_version, num_groups. Answers the number of groups too old, and the entry.
local config, counters, groups, ready, ledger = KEYS[1], KEYS[2], KEYS[8], KEYS[13], KEYS[14]
local run_id, epoch, step, base, wanted = unpack(ARGV)
local rules = redis.call('GET', config)
if not rules then return {'refused', 'UNKNOWN_RUN', run_id} end
local current = redis.call('HGET', counters, 'epoch') or '0'
if current ~= epoch then return {'refused', 'STALE_TRAINER', run_id, epoch, current} end
local known = redis.call('HGET', ledger, step)
if known then return {'ok', 0, known} end
local next_step = tonumber(redis.call('HGET', counters, 'leased') or 0) + 1
if tonumber(step) ~= next_step then
  return {'refused', 'STEP_ORDER', step, string.format('%d', next_step)}
end
rules = cjson.decode(rules)
wanted = tonumber(wanted)
if wanted == 0 then wanted = rules.groups_per_step end
local bound = rules.groups_per_step * (rules.max_staleness + 1)
if wanted > bound then
  return {'refused', 'TOO_MANY_GROUPS', ARGV[5], string.format('%d', bound)}
end

local masks, oldest = rules.staleness_policy == 3, tonumber(base) - rules.max_staleness
local fresh, samples, too_old, seen, length = {}, {}, {}, 0, redis.call('LLEN', ready)
while #fresh < wanted and seen < length do
  local task_id = redis.call('LINDEX', ready, seen)
  local group = cjson.decode(redis.call('HGET', groups, task_id))
  seen = seen + 1
  if masks or group.min_version >= oldest then
    table.insert(fresh, task_id)
    for _, slot in ipairs(group.slots) do
      for _, name in ipairs(slot.samples) do table.insert(samples, name) end
    end
  else
    table.insert(too_old, task_id)
  end
end
local enough = #fresh == wanted
if enough then redis.call('LTRIM', ready, seen, -1) end
for _, task_id in ipairs(too_old) do
  if not enough then redis.call('LREM', ready, 1, task_id) end
  redis.call('HDEL', groups, task_id)
end
if #too_old > 0 then
  redis.call('HINCRBY', counters, 'discarded', #too_old)
  redis.call('HINCRBY', counters, 'version:ready', 1)
end
if #too_old > 0 or enough then redis.call('HINCRBY', counters, 'version:tasks', 1) end
if not enough then return {'ok', #too_old} end
local entry = cjson.encode({groups = fresh, samples = samples, base = tonumber(base)})
redis.call('HSET', ledger, step, entry)
redis.call('HSET', counters, 'leased', step)
redis.call('HINCRBY', counters, 'taken', wanted)
return {'ok', #too_old, entry}
