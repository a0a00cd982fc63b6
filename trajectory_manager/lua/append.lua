-- Appends tokens to a turn at an offset, behind the fence, and may close the turn.
-- ARGV: rollout_id, server, turn_id, incarnation, counter, offset or '' (the end), ids, logprobs,
-- finish or '', then num_tokens and kind of each span.
-- A segment is 4 bytes for each id, then 4 for each log-prob. Answers the tokens now stored and how many are new.
local header, live, kinds, segments = KEYS[1], KEYS[4], KEYS[5], KEYS[6] .. ARGV[3]
local rollout_id, server, turn_id, incarnation, counter, offset, ids, logprobs, finish = unpack(ARGV, 1, 9)
local head = redis.call('HMGET', header, 'state', 'schema', 'server', 'incarnation')
if not head[1] then return {'refused', 'UNKNOWN_ROLLOUT', rollout_id} end
if not head[2] then return {'refused', 'OLD_SCHEMA'} end
local turn = redis.call('HGET', live, turn_id)
if not turn then return {'refused', 'UNKNOWN_TURN', turn_id} end
local stored, inc, count, attempt, spans, finished =
  string.match(turn, '^(%d+) (%d+) (%d+) (%S+) (%S+) ?(.*)$')
local fresh = finished ~= '' or (head[3] == server and head[4] == inc)
if inc ~= incarnation or count ~= counter or not fresh then
  return {'refused', 'STALE_TURN', turn_id, incarnation .. '.' .. counter, inc .. '.' .. count}
end
if finished == '' or finish == '' then
  if head[1] ~= '1' then return {'refused', 'CLOSED_ROLLOUT', rollout_id, head[1]} end
  if finished ~= '' then return {'refused', 'CLOSED_TURN', turn_id} end
elseif finish ~= finished then
  return {'refused', 'OTHER_FINISH', turn_id}
end

stored = tonumber(stored)
local given, first = #ids / 4, tonumber(offset) or stored
-- Beyond the end of a finished turn is no gap, and its rollout may have ended well.
if first > stored and finished == '' then
  local now = redis.call('TIME')
  redis.call('HSET', header, 'state', 3, 'finished', now[1] .. '.' .. string.format('%06d', now[2]), 'outcome',
    '{"rewards": [], "failure_class": 3, "failure_message": "tokens before an appended chunk are missing"}')
  return {'refused', 'GAP', turn_id, offset, string.format('%d', stored)}
end

-- The tokens [from, to) of the turn as they are stored.
local function recorded(from, to)
  local kept_ids, kept_logprobs, start = {}, {}, 0
  for _, segment in ipairs(redis.call('LRANGE', segments, 0, -1)) do
    local length = #segment / 8
    local a, b = math.max(from - start, 0), math.min(to - start, length)
    if a < b then
      table.insert(kept_ids, string.sub(segment, 1 + a * 4, b * 4))
      table.insert(kept_logprobs, string.sub(segment, 1 + (length + a) * 4, (length + b) * 4))
    end
    start = start + length
  end
  return table.concat(kept_ids), table.concat(kept_logprobs)
end

local overlap = math.min(stored - first, given)
if overlap > 0 then
  local old_ids, old_logprobs = recorded(first, first + overlap)
  if old_ids ~= string.sub(ids, 1, overlap * 4) or old_logprobs ~= string.sub(logprobs, 1, overlap * 4) then
    return {'refused', 'OTHER_TOKENS', turn_id, offset}
  end
end
if finished ~= '' then
  if overlap < given then return {'refused', 'CLOSED_TURN', turn_id} end
  return {'ok', stored, 0}
end

local new = given - overlap
if new > 0 then
  if overlap > 0 then ids, logprobs = string.sub(ids, overlap * 4 + 1), string.sub(logprobs, overlap * 4 + 1) end
  redis.call('RPUSH', segments, ids .. logprobs)
end
-- Spans are "start:kind", one where the kind changes; there are few, new weights or another server make one.
local last, start = string.match(spans, '(%d+)$'), 0
for i = 10, #ARGV, 2 do
  local stop = start + tonumber(ARGV[i])
  if stop > overlap then
    local kind = redis.call('LPOS', kinds, ARGV[i + 1])
    if not kind then kind = redis.call('RPUSH', kinds, ARGV[i + 1]) - 1 end
    kind = string.format('%d', kind)
    if kind ~= last then
      local span = string.format('%d:', first + math.max(start, overlap)) .. kind
      spans, last = last and spans .. ',' .. span or span, kind
    end
  end
  start = stop
end
if finish ~= '' then finish = ' ' .. finish end
redis.call('HSET', live, turn_id,
  string.format('%d ', stored + new) .. inc .. ' ' .. count .. ' ' .. attempt .. ' ' .. spans .. finish)
return {'ok', stored + new, new}
