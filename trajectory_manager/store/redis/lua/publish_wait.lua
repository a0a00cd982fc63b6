-- What a publish under WAIT would make too old. ARGV: run_id, epoch, weight_version.
-- Returns the seconds it waits at most, the groups with a finished sample that would be too old,
-- and the running rollouts of the others.
local config, counters, groups, order = KEYS[1], KEYS[2], KEYS[8], KEYS[18]
local run_id, epoch, version = unpack(ARGV)
local rules = redis.call('GET', config)
if not rules then return {'error', 'UNKNOWN_RUN', run_id} end
local current = redis.call('HGET', counters, 'epoch') or '0'
if current ~= epoch then return {'error', 'STALE_TRAINER', run_id, epoch, current} end
rules = cjson.decode(rules)
local WAIT = 2
if rules.staleness_policy ~= WAIT then return {'ok', '0', 0, {}} end
local time = redis.call('TIME')
local now = time[1] + time[2] / 1000000
if redis.call('HGET', counters, 'publish:version') ~= version then
  local started = string.format('%.6f', now)
  redis.call('HSET', counters, 'publish:version', version, 'publish:started', started)
end
local started = tonumber(redis.call('HGET', counters, 'publish:started'))
local seconds = math.max(0, started + rules.publish_wait_seconds - now)
local oldest, blocking, running = tonumber(version) - rules.max_staleness, 0, {}
for _, task_id in ipairs(redis.call('ZRANGE', order, 0, -1)) do
  local group, too_old, leased = cjson.decode(redis.call('HGET', groups, task_id)), false, {}
  for i, slot in ipairs(group.slots) do
    if slot.state == 'done' then
      too_old = too_old or #slot.samples > 0 and slot.min_version < oldest
    elseif slot.state == 'leased' then
      table.insert(leased, string.format('%s/%d/%d', task_id, i - 1, slot.attempt))
    end
  end
  if too_old then blocking = blocking + 1 end
  for _, name in ipairs(too_old and {} or leased) do table.insert(running, name) end
end
return {'ok', string.format('%.6f', seconds), blocking, running}
