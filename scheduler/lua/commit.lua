-- Replace what changed, if the caller is the newest scheduler.
-- KEYS: counters, nodes, gangs, events
-- ARGV: incarnation, max_events, changes as JSON:
--   {counters: [name, value, ...], nodes: [id, node, ...], gangs: [key, gang, ...],
--    released: [key, ...], events: [sequence, event, ...]}
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
set(KEYS[2], changes.nodes)
set(KEYS[3], changes.gangs)
for _, key in ipairs(changes.released) do
  redis.call('HDEL', KEYS[3], key)
end
for i = 1, #changes.events, 2 do
  redis.call('ZADD', KEYS[4], changes.events[i], changes.events[i + 1])
end
redis.call('ZREMRANGEBYRANK', KEYS[4], 0, -1 - tonumber(ARGV[2]))
return 1
