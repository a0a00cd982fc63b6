-- Closes a turn, behind the fence. ARGV: rollout_id, turn_id, incarnation, counter, "reason answer_key".
local header, _, _, writers, ends = unpack(KEYS)
local rollout_id, turn_id, incarnation, counter, finish = unpack(ARGV)
local state = redis.call('HGET', header, 'state')
if not state then return {'refused', 'UNKNOWN_ROLLOUT', rollout_id} end
local writer = redis.call('HGET', writers, turn_id)
if not writer then return {'refused', 'UNKNOWN_TURN', turn_id} end
local inc, count, server = string.match(writer, '^(%d+):(%d+):(%x+):')
local stored = redis.call('HGET', ends, turn_id)
local current = string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
local fresh = inc == incarnation and count == counter and (stored or server == current)
if not fresh then return {'refused', 'STALE_TURN', turn_id, incarnation .. '.' .. counter, inc .. '.' .. count} end
if stored then
  if stored ~= finish then return {'refused', 'OTHER_FINISH', turn_id} end
  return {'ok'}
end
if state ~= '1' then return {'refused', 'CLOSED_ROLLOUT', rollout_id, state} end
redis.call('HSET', ends, turn_id, finish)
return {'ok'}
