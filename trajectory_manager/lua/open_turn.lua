-- Creates a turn or takes it over. ARGV: rollout_id, credential, turn_id, attempt_id, opening, digest.
-- Answers the opening that is stored, incarnation and counter of the epoch, and the end if there is one.
local header, order, turns, writers, ends = unpack(KEYS)
local rollout_id, credential, turn_id, attempt_id, opening, digest = unpack(ARGV)
local head = redis.call('HMGET', header, 'state', 'credential', 'incarnation', 'server')
if not head[1] then return {'refused', 'UNKNOWN_ROLLOUT', rollout_id} end
if head[2] ~= credential then return {'refused', 'BAD_CREDENTIAL', rollout_id} end
local stored = redis.call('HGET', turns, turn_id)
local writer = redis.call('HGET', writers, turn_id)
local incarnation, counter, server, attempt
if stored then
  if cjson.decode(stored).prompt_digest ~= digest then return {'refused', 'OTHER_PROMPT', turn_id} end
  incarnation, counter, server, attempt = string.match(writer, '^(%d+):(%d+):(%x+):(.*)$')
  local finish = redis.call('HGET', ends, turn_id)
  if finish then return {'ok', stored, incarnation, counter, finish} end
end
if head[1] ~= '1' then return {'refused', 'CLOSED_ROLLOUT', rollout_id, head[1]} end
-- A store that started again may have lost its last writes, epochs among them: the time of the first
-- look after each start makes sure that no epoch is given out twice.
local current = string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
local newest = head[3]
if head[4] ~= current then
  newest = math.max(tonumber(newest or '0') + 1, tonumber(redis.call('TIME')[1]))
  newest = string.format('%d', newest)
  redis.call('HSET', header, 'incarnation', newest, 'server', current)
end
if not stored then
  redis.call('RPUSH', order, turn_id)
  redis.call('HSET', turns, turn_id, opening)
  stored, counter = opening, 1
elseif server ~= current then
  counter = 1
elseif attempt ~= attempt_id then
  counter = tonumber(counter) + 1
end
counter = string.format('%d', counter)
redis.call('HSET', writers, turn_id, newest .. ':' .. counter .. ':' .. current .. ':' .. attempt_id)
return {'ok', stored, newest, counter, ''}
