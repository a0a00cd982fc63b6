-- Reads a rollout but for its segments. ARGV: rollout_id, detail, then turn_id...
-- detail: 'header', 'turns' (those named, or all), 'newest' (the last one).
-- Answers the header, the kinds of tokens, and the name, opening and live state of each turn.
local header, order, turns, live, kinds = unpack(KEYS, 1, 5)
local rollout_id, detail = ARGV[1], ARGV[2]
local head = redis.call('HGETALL', header)
if #head == 0 then return {'ok', false} end
if redis.call('HEXISTS', header, 'schema') == 0 then return {'refused', 'OLD_SCHEMA'} end
if detail == 'header' then return {'ok', head} end
local names = {unpack(ARGV, 3)}
if #names == 0 then names = redis.call('LRANGE', order, detail == 'newest' and -1 or 0, -1) end
local found = {}
for i, name in ipairs(names) do
  local opening = redis.call('HGET', turns, name)
  if not opening then return {'refused', 'UNKNOWN_TURN', name} end
  found[i] = {name, opening, redis.call('HGET', live, name)}
end
return {'ok', head, redis.call('LRANGE', kinds, 0, -1), found}
