-- Creates the header of a rollout. ARGV: rollout_id, leased (0/1), identity, credential, traceparent,
-- required weight version, labels as JSON or ''.
local header = KEYS[1]
local rollout_id, leased, identity, credential, traceparent, required_version, labels = unpack(ARGV)
local stored = redis.call('HMGET', header, 'identity', 'credential', 'state', 'num_turns')
if not stored[3] then
  local now = redis.call('TIME')
  redis.call('HSET', header, 'identity', identity, 'credential', credential,
    'traceparent', traceparent, 'required_version', required_version, 'state', 1,
    'created', now[1] .. '.' .. string.format('%06d', now[2]))
  if labels ~= '' then redis.call('HSET', header, 'labels', labels) end
  return {'ok'}
end
if stored[3] ~= '1' then return {'error', 'FINISHED_ROLLOUT', rollout_id, stored[3]} end
-- The answer to the first attempt may be lost, and with it the credential.
local may_change = leased == '1' and not stored[4]
if stored[1] ~= identity or (stored[2] ~= credential and not may_change) then
  return {'error', 'OTHER_ROLLOUT', rollout_id}
end
redis.call('HSET', header, 'credential', credential)
return {'ok'}
