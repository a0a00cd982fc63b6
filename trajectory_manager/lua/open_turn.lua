-- Creates a turn or takes it over. ARGV: rollout_id, server, credential, turn_id, attempt_id, opening, digest.
-- Answers the opening that is stored and the turn's live state.
local header, order, turns, live = unpack(KEYS, 1, 4)
local rollout_id, server, credential, turn_id, attempt_id, opening, digest = unpack(ARGV)
local head = redis.call('HMGET', header, 'state', 'schema', 'credential', 'incarnation', 'server')
if not head[1] then return {'refused', 'UNKNOWN_ROLLOUT', rollout_id} end
if not head[2] then return {'refused', 'OLD_SCHEMA'} end
if head[3] ~= credential then return {'refused', 'BAD_CREDENTIAL', rollout_id} end
local known = redis.call('HGET', turns, turn_id)
local stored, inc, count, attempt, spans, finished = '0', '', '1', attempt_id, '-', ''
if known then
  if cjson.decode(known).prompt_digest ~= digest then return {'refused', 'OTHER_PROMPT', turn_id} end
  local turn = redis.call('HGET', live, turn_id)
  stored, inc, count, attempt, spans, finished =
    string.match(turn, '^(%d+) (%d+) (%d+) (%S+) (%S+) ?(.*)$')
  if finished ~= '' then return {'ok', known, turn} end
end
if head[1] ~= '1' then return {'refused', 'CLOSED_ROLLOUT', rollout_id, head[1]} end
-- A store that started again may have lost its last writes, epochs among them: the time of the first
-- look after each start makes sure that no epoch is given out twice.
local incarnation = head[4]
if head[5] ~= server then
  incarnation = math.max(tonumber(incarnation or '0') + 1, tonumber(redis.call('TIME')[1]))
  incarnation = string.format('%d', incarnation)
  redis.call('HSET', header, 'incarnation', incarnation, 'server', server)
end
if not known then
  redis.call('RPUSH', order, turn_id)
  redis.call('HSET', turns, turn_id, opening)
  known = opening
elseif inc ~= incarnation then
  count = '1'
elseif attempt ~= attempt_id then
  count = string.format('%d', tonumber(count) + 1)
end
local turn = stored .. ' ' .. incarnation .. ' ' .. count .. ' ' .. attempt_id .. ' ' .. spans
redis.call('HSET', live, turn_id, turn)
return {'ok', known, turn}
