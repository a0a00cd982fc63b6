-- Records whole rollouts that were generated elsewhere. Idempotent. KEYS: header and chunks of each.
-- ARGV: of each rollout_id, identity, traceparent, state, outcome, digest of all that, number of turns, and of each
-- of these turn_id, record, state, chunk. Returns of each 1, 0 if it was recorded before, or an error.
local time = redis.call('TIME')
local now = time[1] .. '.' .. string.format('%06d', time[2])

local function record(header, chunks, rollout_id, identity, traceparent, state, outcome, digest, first, last)
  local stored = redis.call('HMGET', header, 'state', 'recorded')
  if stored[1] then
    if stored[2] == digest then return {'ok', 0} end
    return {'error', 'OTHER_ROLLOUT', rollout_id}
  end
  for i = first, last, 4 do
    local turn_id, turn, turn_state, chunk = unpack(ARGV, i, i + 3)
    redis.call('HSET', header, 'turn:' .. turn_id, turn, 'state:' .. turn_id, turn_state, 'newest_turn', turn_id)
    if chunk ~= '' then redis.call('RPUSH', chunks .. turn_id, chunk) end
  end
  redis.call('HSET', header, 'identity', identity, 'credential', '', 'traceparent', traceparent,
    'state', state, 'outcome', outcome, 'created', now, 'finished', now, 'recorded', digest,
    'num_turns', (last - first + 1) / 4)
  return {'ok', 1}
end

local results, arg = {}, 1
for i = 1, #KEYS, 2 do
  local first = arg + 7
  local last = first + 4 * ARGV[arg + 6] - 1
  local rollout_id, identity, traceparent, state, outcome, digest = unpack(ARGV, arg, arg + 5)
  table.insert(results,
    record(KEYS[i], KEYS[i + 1], rollout_id, identity, traceparent, state, outcome, digest, first, last))
  arg = last + 1
end
return results
