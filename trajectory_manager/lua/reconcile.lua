-- Makes a trainer the one that leads the run. ARGV: run_id, step, trainer_id.
-- Answers its epoch and the steps it will be given again.
local config, counters, groups, ready, ledger, commits, trainers =
  KEYS[1], KEYS[2], KEYS[8], KEYS[13], KEYS[14], KEYS[15], KEYS[16]
if redis.call('EXISTS', config) == 0 then return {'refused', 'UNKNOWN_RUN', ARGV[1]} end
local step, current = tonumber(ARGV[2]), tonumber(redis.call('HGET', counters, 'epoch') or 0)
local epoch = redis.call('HGET', trainers, ARGV[3])
if not epoch then
  -- Not before the time in ms: an epoch given out and then lost by the store is not given again.
  local time = redis.call('TIME')
  epoch = string.format('%d', math.max(current + 1, math.floor(time[1] * 1000 + time[2] / 1000)))
  redis.call('HSET', trainers, ARGV[3], epoch)
end
if tonumber(epoch) < current then
  return {'refused', 'STALE_TRAINER', ARGV[1], epoch, string.format('%d', current)}
end
local steps = {}
for _, known in ipairs(redis.call('HKEYS', ledger)) do table.insert(steps, tonumber(known)) end
table.sort(steps)
local restored = step < tonumber(redis.call('HGET', counters, 'committed') or 0)
local pending, covered, leased = {}, 0, step
for i = #steps, 1, -1 do
  local entry = cjson.decode(redis.call('HGET', ledger, steps[i]))
  if steps[i] <= step then
    covered = covered + #entry.samples
    for _, task_id in ipairs(entry.groups) do redis.call('HDEL', groups, task_id) end
    redis.call('HDEL', ledger, steps[i])
  elseif restored then
    for j = #entry.groups, 1, -1 do redis.call('LPUSH', ready, entry.groups[j]) end
    redis.call('HINCRBY', counters, 'taken', -#entry.groups)
    redis.call('HDEL', ledger, steps[i])
  else
    table.insert(pending, 1, steps[i])
    leased = math.max(leased, steps[i])
  end
end
if covered > 0 then redis.call('HSET', commits, step, covered) end
redis.call('HSET', counters, 'epoch', epoch, 'committed', step, 'leased', leased)
redis.call('HINCRBY', counters, 'version:ready', 1)
return {'ok', epoch, pending}
