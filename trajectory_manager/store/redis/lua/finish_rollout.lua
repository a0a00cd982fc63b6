-- Finishes rollouts that run. KEYS: header of each. ARGV: of each rollout_id, has credential (0/1), credential,
-- state, outcome, identity. Without a credential a rollout that never started is created finished, so that it cannot
-- start later. Returns of each its whole header, or an error.
local time = redis.call('TIME')
local now = time[1] .. '.' .. string.format('%06d', time[2])

local function finish(header, rollout_id, has_credential, credential, state, outcome, identity)
  local stored = redis.call('HMGET', header, 'state', 'credential')
  if not stored[1] then
    if has_credential == '1' then return {'error', 'UNKNOWN_ROLLOUT', rollout_id} end
    redis.call('HSET', header, 'identity', identity, 'credential', '', 'traceparent', '', 'created', now)
    stored[1] = '1'
  elseif has_credential == '1' and stored[2] ~= credential then
    return {'error', 'BAD_CREDENTIAL', rollout_id}
  end
  if stored[1] == '1' then
    redis.call('HSET', header, 'state', state, 'outcome', outcome, 'finished', now)
  end
  return {'ok', redis.call('HGETALL', header)}
end

local results = {}
for i = 1, #KEYS do results[i] = finish(KEYS[i], unpack(ARGV, i * 6 - 5, i * 6)) end
return results
