-- Consumes every entry up to a step for good. ARGV: run_id, epoch, step. Answers the samples covered.
local config, counters, groups, ledger, commits = KEYS[1], KEYS[2], KEYS[8], KEYS[14], KEYS[15]
if redis.call('EXISTS', config) == 0 then return {'refused', 'UNKNOWN_RUN', ARGV[1]} end
local counts = redis.call('HMGET', counters, 'epoch', 'committed', 'leased')
local current, step = counts[1] or '0', tonumber(ARGV[3])
if current ~= ARGV[2] then return {'refused', 'STALE_TRAINER', ARGV[1], ARGV[2], current} end
if step > tonumber(counts[3] or 0) then return {'refused', 'UNKNOWN_STEP', ARGV[3]} end
local committed, covered, found = tonumber(counts[2] or 0), 0, false
for past = committed + 1, step do
  local name = string.format('%d', past)
  local entry = redis.call('HGET', ledger, name)
  if entry then
    entry, found = cjson.decode(entry), true
    covered = covered + #entry.samples
    for _, task_id in ipairs(entry.groups) do redis.call('HDEL', groups, task_id) end
    redis.call('HDEL', ledger, name)
  end
end
if found then redis.call('HSET', commits, step, covered) end
redis.call('HSET', counters, 'committed', math.max(committed, step))
return {'ok', tonumber(redis.call('HGET', commits, step) or 0)}
