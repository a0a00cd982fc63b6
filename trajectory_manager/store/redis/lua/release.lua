-- Gives the newest uncommitted step back to the head of the queue. ARGV: run_id, epoch, step.
local config, counters, groups, ready, ledger, order =
  KEYS[1], KEYS[2], KEYS[8], KEYS[13], KEYS[14], KEYS[18]
if redis.call('EXISTS', config) == 0 then return {'refused', 'UNKNOWN_RUN', ARGV[1]} end
local current = redis.call('HGET', counters, 'epoch') or '0'
if current ~= ARGV[2] then return {'refused', 'STALE_TRAINER', ARGV[1], ARGV[2], current} end
local entry = redis.call('HGET', ledger, ARGV[3])
if not entry then return {'ok'} end
local leased = redis.call('HGET', counters, 'leased')
if leased ~= ARGV[3] then return {'refused', 'STEP_ORDER', ARGV[3], leased} end
entry = cjson.decode(entry)
for i = #entry.groups, 1, -1 do
  local task_id = entry.groups[i]
  local group = cjson.decode(redis.call('HGET', groups, task_id))
  redis.call('LPUSH', ready, task_id)
  if group.admission then redis.call('ZADD', order, group.admission, task_id) end
end
if entry.open then
  redis.call('HSET', counters, 'open', 0)
else
  redis.call('HINCRBY', counters, 'taken', -#entry.groups)
end
redis.call('HDEL', ledger, ARGV[3])
redis.call('HSET', counters, 'leased', tonumber(leased) - 1)
redis.call('HINCRBY', counters, 'version:ready', 1)
return {'ok'}
