-- Records a whole rollout that was generated elsewhere. Idempotent.
-- ARGV: rollout_id, identity, traceparent, state, outcome, digest of it all, kinds (JSON), then for each turn
-- turn_id, opening, live state, segment.
local header, order, turns, live, kinds, segments = unpack(KEYS)
local rollout_id, identity, traceparent, state, outcome, digest, new_kinds = unpack(ARGV, 1, 7)
local stored = redis.call('HMGET', header, 'state', 'recorded')
if stored[1] then
  if stored[2] == digest then return {'ok', 0} end
  return {'refused', 'OTHER_ROLLOUT', rollout_id}
end
local time = redis.call('TIME')
local now = time[1] .. '.' .. string.format('%06d', time[2])
for _, kind in ipairs(cjson.decode(new_kinds)) do redis.call('RPUSH', kinds, kind) end
local i = 8
while i <= #ARGV do
  local turn_id, opening, turn, segment = unpack(ARGV, i, i + 3)
  redis.call('RPUSH', order, turn_id)
  redis.call('HSET', turns, turn_id, opening)
  redis.call('HSET', live, turn_id, turn)
  if segment ~= '' then redis.call('RPUSH', segments .. turn_id, segment) end
  i = i + 4
end
redis.call('HSET', header, 'schema', 2, 'identity', identity, 'credential', '', 'traceparent', traceparent,
  'state', state, 'outcome', outcome, 'created', now, 'finished', now, 'recorded', digest)
return {'ok', 1}
