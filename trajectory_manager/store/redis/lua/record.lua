-- Records whole rollouts that were generated elsewhere. Idempotent. KEYS: header and segments of each.
-- ARGV: for each rollout_id, identity, traceparent, state, outcome, digest of it all, number of turns, and for each
-- of these turn_id, turn, live state, segment. Answers for each 1, 0 if it was there, or a refusal.
local time = redis.call('TIME')
local now = time[1] .. '.' .. string.format('%06d', time[2])

local function record(header, segments, rollout_id, identity, traceparent, state, outcome, digest, first, last)
  local stored = redis.call('HMGET', header, 'state', 'recorded')
  if stored[1] then
    if stored[2] == digest then return {'ok', 0} end
    return {'refused', 'OTHER_ROLLOUT', rollout_id}
  end
  for i = first, last, 4 do
    local turn_id, turn, live, segment = unpack(ARGV, i, i + 3)
    redis.call('HSET', header, 'turn:' .. turn_id, turn, 'live:' .. turn_id, live, 'newest_turn', turn_id)
    if segment ~= '' then redis.call('RPUSH', segments .. turn_id, segment) end
  end
  redis.call('HSET', header, 'identity', identity, 'credential', '', 'traceparent', traceparent,
    'state', state, 'outcome', outcome, 'created', now, 'finished', now, 'recorded', digest,
    'num_turns', (last - first + 1) / 4)
  return {'ok', 1}
end

local answers, arg = {}, 1
for i = 1, #KEYS, 2 do
  local first = arg + 7
  local last = first + 4 * ARGV[arg + 6] - 1
  local rollout_id, identity, traceparent, state, outcome, digest = unpack(ARGV, arg, arg + 5)
  table.insert(answers,
    record(KEYS[i], KEYS[i + 1], rollout_id, identity, traceparent, state, outcome, digest, first, last))
  arg = last + 1
end
return answers
