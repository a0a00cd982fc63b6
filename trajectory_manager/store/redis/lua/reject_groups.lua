-- requires: _dead_letters _steps
-- Takes groups out of the ledger entry of a step: they become dead letters. The entry opens for others, and later
-- entries return to the queue. Replayed groups leave the entry and the replay buffer.
-- ARGV: run_id, epoch, step, max_dead_letters, then task_id and message of each.
-- Returns how many left, and whether the entry is open (0/1).
local config, counters, groups, ledger, replay = KEYS[1], KEYS[2], KEYS[8], KEYS[14], KEYS[24]
local run_id, epoch, step, max_dead_letters = unpack(ARGV, 1, 4)
if redis.call('EXISTS', config) == 0 then return {'error', 'UNKNOWN_RUN', run_id} end
local counts = redis.call('HMGET', counters, 'epoch', 'committed_step')
local current, committed = counts[1] or '0', counts[2] or 0
if current ~= epoch then return {'error', 'STALE_TRAINER', run_id, epoch, current} end
local known = redis.call('HGET', ledger, step)
if not known then return {'error', 'UNKNOWN_STEP', step} end
local entry, rejected = cjson.decode(known), {}
for i = 5, #ARGV, 2 do rejected[ARGV[i]] = ARGV[i + 1] end

local function is_kept(sample) return not rejected[string.match(sample, '^(.+)/%d+/%d+#')] end

-- Those of `names` that stay.
local function kept_of(names, stays)
  local kept = {}
  for _, name in ipairs(names) do
    if stays(name) then table.insert(kept, name) end
  end
  return kept
end

local replayed = kept_of(entry.replayed, is_kept)
local num_replayed = 0
if #replayed < #entry.replayed then
  for task_id in pairs(rejected) do num_replayed = num_replayed + redis.call('HDEL', replay, task_id) end
end
local fresh = kept_of(entry.groups, function(task_id) return not rejected[task_id] end)
local num_fresh = #entry.groups - #fresh
if num_fresh == 0 then
  local changed = #replayed < #entry.replayed
  entry.replayed = replayed
  if changed then redis.call('HSET', ledger, step, cjson.encode(entry)) end
  return {'ok', num_replayed, entry.open and 1 or 0}
end

for _, task_id in ipairs(entry.groups) do
  if rejected[task_id] then
    local group = cjson.decode(redis.call('HGET', groups, task_id))
    dead_letter(task_id, group, REJECTED, rejected[task_id], committed, max_dead_letters)
  end
end
-- What was leased after it was trained by no trainer of this epoch.
local later = {}
for _, number in ipairs(redis.call('HKEYS', ledger)) do
  if tonumber(number) > tonumber(step) then table.insert(later, tonumber(number)) end
end
table.sort(later, function(a, b) return a > b end)
for _, number in ipairs(later) do
  return_step(cjson.decode(redis.call('HGET', ledger, number)))
  redis.call('HDEL', ledger, number)
end
uncount_step(entry)
redis.call('HSET', counters, 'open_groups', #fresh, 'leased_step', step)
redis.call('HINCRBY', counters, 'discarded', num_fresh)
-- The replayed groups are drawn again when the step is whole. Its deliveries so far were those of a bad group.
entry.groups, entry.samples, entry.replayed = fresh, kept_of(entry.samples, is_kept), {}
entry.open, entry.streamed, entry.deliveries = true, nil, 1
redis.call('HSET', ledger, step, cjson.encode(entry))
record_awaited_step(counters, string.format('%d', entry.base))
redis.call('HINCRBY', counters, 'version:tasks', 1)
redis.call('HINCRBY', counters, 'version:ready', 1)
return {'ok', num_fresh + num_replayed, 1}
