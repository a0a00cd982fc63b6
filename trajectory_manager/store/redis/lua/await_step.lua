-- requires: _dead_letters _replay _stale_groups _steps
-- The trainer waits for a step, which starts from these weights. Complete groups that are too old for it become dead
-- letters now, so that others are generated before the trainer takes its nodes.
-- ARGV: run_id, epoch, step, base_version, max_dead_letters. Returns the number of groups that were too old.
local config, counters, groups, ready = KEYS[1], KEYS[2], KEYS[8], KEYS[13]
local run_id, epoch, step, base, max_dead_letters = unpack(ARGV)
local rules = redis.call('GET', config)
if not rules then return {'error', 'UNKNOWN_RUN', run_id} end
local known = redis.call('HMGET', counters, 'epoch', 'leased_step')
local current = known[1] or '0'
if current ~= epoch then return {'error', 'STALE_TRAINER', run_id, epoch, current} end
if tonumber(step) <= tonumber(known[2] or '0') then return {'ok', 0} end
-- From now on admission relies on this trainer to report when it waits.
redis.call('HSET', counters, 'reporting_epoch', epoch)
record_awaited_step(counters, base)

rules = cjson.decode(rules)
local too_old = 0
for _, task_id in ipairs(redis.call('LRANGE', ready, 0, -1)) do
  local group = cjson.decode(redis.call('HGET', groups, task_id))
  if is_too_old(rules, group, tonumber(base)) then
    too_old = too_old + 1
    dead_letter_stale(rules, task_id, group, tonumber(step), tonumber(base), max_dead_letters)
  end
end
if too_old > 0 then
  redis.call('HINCRBY', counters, 'version:ready', 1)
  redis.call('HINCRBY', counters, 'version:tasks', 1)
end
return {'ok', too_old}
