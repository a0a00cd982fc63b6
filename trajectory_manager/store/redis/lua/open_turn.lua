-- Creates a turn or takes it over. KEYS: header and segments. ARGV: rollout_id, server, credential, turn_id,
-- attempt_id, opening, digest, then fields of the header. Answers the turn as it is stored, its live state, its
-- segments, and the values of those fields.
local header = KEYS[1]
local rollout_id, server, credential, turn_id, attempt_id, opening, digest = unpack(ARGV, 1, 7)

local function opened(known, live)
  local segments = redis.call('LRANGE', KEYS[2] .. turn_id, 0, -1)
  return {'ok', known, live, segments, redis.call('HMGET', header, unpack(ARGV, 8))}
end

local head = redis.call('HMGET', header, 'state', 'credential', 'incarnation', 'server',
  'turn:' .. turn_id, 'live:' .. turn_id)
local known, live = head[5], head[6]
if not head[1] then return {'refused', 'UNKNOWN_ROLLOUT', rollout_id} end
if head[2] ~= credential then return {'refused', 'BAD_CREDENTIAL', rollout_id} end
local stored, inc, count, attempt, spans, finished = '0', '', '1', attempt_id, '-', ''
if known then
  if string.match(known, '^%d+ (%S+)') ~= digest then return {'refused', 'OTHER_PROMPT', turn_id} end
  stored, inc, count, attempt, spans, finished = string.match(live, '^(%d+) (%d+) (%d+) (%S+) (%S+) ?(.*)$')
  if finished ~= '' then return opened(known, live) end
end
if head[1] ~= '1' then return {'refused', 'CLOSED_ROLLOUT', rollout_id, head[1]} end
-- A store that started again may have lost its last writes, epochs among them: the time of the first
-- look after each start makes sure that no epoch is given out twice.
local incarnation = head[3]
if head[4] ~= server then
  incarnation = math.max(tonumber(incarnation or '0') + 1, tonumber(redis.call('TIME')[1]))
  incarnation = string.format('%d', incarnation)
end
if not known then
  local number = redis.call('HINCRBY', header, 'num_turns', 1)
  known = string.format('%d ', number) .. digest .. ' ' .. opening
elseif inc ~= incarnation then
  count = '1'
elseif attempt ~= attempt_id then
  count = string.format('%d', tonumber(count) + 1)
end
live = stored .. ' ' .. incarnation .. ' ' .. count .. ' ' .. attempt_id .. ' ' .. spans
local changes = {'incarnation', incarnation, 'server', server, 'turn:' .. turn_id, known, 'live:' .. turn_id, live}
if not head[5] then table.insert(changes, 'newest_turn') table.insert(changes, turn_id) end
redis.call('HSET', header, unpack(changes))
return opened(known, live)
