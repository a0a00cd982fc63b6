-- Replace what changed, if the caller is the newest scheduler.
-- KEYS: counters, events, then any hashes
-- ARGV: incarnation, max_events, changes as JSON:
--   {counters: [name, value, ...], events: [sequence, event, ...],
--    hashes: [{set: [field, value, ...], removed: [field, ...]}, ...] in the order of KEYS}
-- Returns 1, or 0 when the caller is superseded.
if redis.call('HGET', KEYS[1], 'incarnation') ~= ARGV[1] then
  return 0
end
local changes = cjson.decode(ARGV[3])

local function set(key, pairs_of)
  for i = 1, #pairs_of, 2 do
    redis.call('HSET', key, pairs_of[i], pairs_of[i + 1])
  end
end

set(KEYS[1], changes.counters)
for i, hash in ipairs(changes.hashes) do
  set(KEYS[2 + i], hash.set)
  for _, field in ipairs(hash.removed) do
    redis.call('HDEL', KEYS[2 + i], field)
  end
end
for i = 1, #changes.events, 2 do
  redis.call('ZADD', KEYS[2], changes.events[i], changes.events[i + 1])
end
redis.call('ZREMRANGEBYRANK', KEYS[2], 0, -1 - tonumber(ARGV[2]))
return 1
