-- Appends tokens to turns, each at its offset and behind its fence, and may close them.
-- KEYS: for each append header and segments. ARGV: server, then for each append rollout_id, turn_id, incarnation,
-- counter, offset or '' (the end), segment, finish or '', spans as "num_tokens:kind,...".
-- A segment is 4 bytes for each id, then 4 for each log-prob. Answers for each append the tokens now stored and how
-- many are new, or a refusal; what follows a refused append of the same turn would leave a gap and is refused with it.
local server = ARGV[1]

-- The tokens [from, to) of a turn as they are stored.
local function recorded(segments, from, to)
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

-- The spans of a turn and those of new tokens, of which the first `overlap` were known; one where the kind changes.
local function joined(spans, new_spans, first, overlap)
  local changes = spans ~= '-' and {spans} or {}
  local last = string.match(string.match(spans, '.*,(.*)') or spans, ':(.*)')
  local start = 0
  for length, kind in string.gmatch(new_spans, '(%d+):([^,]+)') do
    local stop = start + tonumber(length)
    if stop > overlap and kind ~= last then
      table.insert(changes, string.format('%d:', first + math.max(start, overlap)) .. kind)
      last = kind
    end
    start = stop
  end
  return #changes > 0 and table.concat(changes, ',') or '-'
end

-- A gap is infrastructure that failed: nobody has the tokens.
local function fail(header)
  local now = redis.call('TIME')
  redis.call('HSET', header, 'state', 3, 'finished', now[1] .. '.' .. string.format('%06d', now[2]), 'outcome',
    '{"rewards": [], "failure_class": 3, "failure_message": "tokens before an appended chunk are missing"}')
end

local function append(header, segments, rollout_id, turn_id, incarnation, counter, offset, segment, finish, new_spans)
  local live = 'live:' .. turn_id
  local head = redis.call('HMGET', header, 'state', 'server', 'incarnation', live)
  if not head[1] then return {'refused', 'UNKNOWN_ROLLOUT', rollout_id} end
  if not head[4] then return {'refused', 'UNKNOWN_TURN', turn_id} end
  local stored, inc, count, attempt, spans, finished =
    string.match(head[4], '^(%d+) (%d+) (%d+) (%S+) (%S+) ?(.*)$')
  local fresh = finished ~= '' or (head[2] == server and head[3] == inc)
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
  local given, first = #segment / 8, tonumber(offset) or stored
  -- Beyond the end of a finished turn is no gap, and its rollout may have ended well.
  if first > stored and finished == '' then
    fail(header)
    return {'refused', 'GAP', turn_id, offset, string.format('%d', stored)}
  end
  local overlap = math.min(stored - first, given)
  if overlap > 0 then
    local ids, logprobs = string.sub(segment, 1, given * 4), string.sub(segment, given * 4 + 1)
    local old_ids, old_logprobs = recorded(segments, first, first + overlap)
    if old_ids ~= string.sub(ids, 1, overlap * 4) or old_logprobs ~= string.sub(logprobs, 1, overlap * 4) then
      return {'refused', 'OTHER_TOKENS', turn_id, offset}
    end
    segment = string.sub(ids, overlap * 4 + 1) .. string.sub(logprobs, overlap * 4 + 1)
  end
  if finished ~= '' then
    if overlap < given then return {'refused', 'CLOSED_TURN', turn_id} end
    return {stored, 0}
  end

  local new = given - overlap
  if new > 0 then redis.call('RPUSH', segments, segment) end
  redis.call('HSET', header, live, string.format('%d ', stored + new) .. inc .. ' ' .. count .. ' ' .. attempt .. ' ' ..
    joined(spans, new_spans, first, overlap) .. (finish ~= '' and ' ' .. finish or ''))
  return {stored + new, new}
end

local answers, refused = {}, {}
for i = 1, #KEYS / 2 do
  local arg = i * 8 - 6
  local segments = KEYS[i * 2] .. ARGV[arg + 1]
  local answer = refused[segments] or append(KEYS[i * 2 - 1], segments, unpack(ARGV, arg, arg + 7))
  if answer[1] == 'refused' then refused[segments] = answer end
  answers[i] = answer
end
return answers
