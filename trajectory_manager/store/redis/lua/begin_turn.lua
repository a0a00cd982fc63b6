-- Creates a turn or takes it over. KEYS: header and chunks. ARGV: rollout_id, server, credential, turn_id,
-- attempt_id, begin as JSON, prompt digest, only the first turn (0/1), then fields of the header. Returns the turn's
-- record, its state, its chunks, and the values of those fields; nothing where it would not be the first turn.
local header = KEYS[1]
local rollout_id, server, credential, turn_id, attempt_id, begin, digest, only_first = unpack(ARGV, 1, 8)

local function reply(record, state)
  local chunks = redis.call('LRANGE', KEYS[2] .. turn_id, 0, -1)
  return {'ok', record, state, chunks, redis.call('HMGET', header, unpack(ARGV, 9))}
end

-- In what this call differs from the one that began the turn; nil: nothing.
local function difference(record)
  local known_digest, text = string.match(record, '^%d+ (%S+) (.*)$')
  if known_digest ~= digest then return 'prompt' end
  local known, given = cjson.decode(text), cjson.decode(begin)
  if known.sampling ~= given.sampling then return 'sampling' end
  if known.template_fingerprint ~= given.template_fingerprint then return 'template_fingerprint' end
end

local head = redis.call('HMGET', header, 'state', 'credential', 'incarnation', 'server',
  'turn:' .. turn_id, 'state:' .. turn_id, 'newest_turn')
local record, state = head[5], head[6]
if not head[1] then return {'error', 'UNKNOWN_ROLLOUT', rollout_id} end
if head[2] ~= credential then return {'error', 'BAD_CREDENTIAL', rollout_id} end
local stored, inc, count, attempt, spans, ended = '0', '', '1', attempt_id, '-', ''
if record then
  local differs = difference(record)
  if differs then return {'error', 'OTHER_TURN', turn_id, differs} end
  stored, inc, count, attempt, spans, ended = string.match(state, '^(%d+) (%d+) (%d+) (%S+) (%S+) ?(.*)$')
  if ended ~= '' then return reply(record, state) end
end
if only_first == '1' and not record and head[7] then return {'ok'} end
if head[1] ~= '1' then return {'error', 'FINISHED_ROLLOUT', rollout_id, head[1]} end
-- A restarted server may have lost its last writes, epochs among them. The incarnation is at least the time of the
-- first access after each restart, so no epoch is given out twice.
local incarnation = head[3]
if head[4] ~= server then
  incarnation = math.max(tonumber(incarnation or '0') + 1, tonumber(redis.call('TIME')[1]))
  incarnation = string.format('%d', incarnation)
end
if not record then
  local number = redis.call('HINCRBY', header, 'num_turns', 1)
  record = string.format('%d ', number) .. digest .. ' ' .. begin
elseif inc ~= incarnation then
  count = '1'
elseif attempt ~= attempt_id then
  count = string.format('%d', tonumber(count) + 1)
end
state = stored .. ' ' .. incarnation .. ' ' .. count .. ' ' .. attempt_id .. ' ' .. spans
local changes = {
  'incarnation', incarnation, 'server', server, 'turn:' .. turn_id, record, 'state:' .. turn_id, state
}
if not head[5] then table.insert(changes, 'newest_turn') table.insert(changes, turn_id) end
redis.call('HSET', header, unpack(changes))
return reply(record, state)
