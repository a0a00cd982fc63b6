-- Closes a rollout if it runs. ARGV: rollout_id, has credential (0/1), credential, state, outcome, identity.
-- Without a credential also one that never started, so that it cannot start later.
-- Answers the header, the kinds of tokens, and the name, opening and live state of each turn.
local header, order, turns, live, kinds = unpack(KEYS, 1, 5)
local rollout_id, has_credential, credential, state, outcome, identity = unpack(ARGV)
local stored = redis.call('HMGET', header, 'state', 'credential', 'schema')
local time = redis.call('TIME')
local now = time[1] .. '.' .. string.format('%06d', time[2])
if not stored[1] then
  if has_credential == '1' then return {'refused', 'UNKNOWN_ROLLOUT', rollout_id} end
  redis.call('HSET', header, 'schema', 2, 'identity', identity, 'credential', '', 'traceparent', '', 'created', now)
  stored[1] = '1'
elseif not stored[3] then
  return {'refused', 'OLD_SCHEMA'}
elseif has_credential == '1' and stored[2] ~= credential then
  return {'refused', 'BAD_CREDENTIAL', rollout_id}
end
if stored[1] == '1' then
  redis.call('HSET', header, 'state', state, 'outcome', outcome, 'finished', now)
end
local found = {}
for i, name in ipairs(redis.call('LRANGE', order, 0, -1)) do
  found[i] = {name, redis.call('HGET', turns, name), redis.call('HGET', live, name)}
end
return {'ok', redis.call('HGETALL', header), redis.call('LRANGE', kinds, 0, -1), found}
