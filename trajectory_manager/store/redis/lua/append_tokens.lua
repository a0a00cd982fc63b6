-- Appends tokens to turns, each at its offset and under its epoch, and may end them.
-- KEYS: header and chunks of each append. ARGV: server, then of each append rollout_id, turn_id, incarnation,
-- counter, offset, chunk, turn end or '', spans as "num_tokens:kind,...", start of routed experts or '', these.
-- A chunk is 4 bytes for each id, then 4 for each log-prob. Returns of each append the tokens now stored and how
-- many are new, or an error; later appends of the same turn get that error too, as they would leave a gap.
local server = ARGV[1]

-- The stored tokens [from, to) of a turn: ids, log-probs.
local function stored_tokens(chunks, from, to)
  local ids, logprobs, start = {}, {}, 0
  for _, chunk in ipairs(redis.call('LRANGE', chunks, 0, -1)) do
    local length = #chunk / 8
    local a, b = math.max(from - start, 0), math.min(to - start, length)
    if a < b then
      table.insert(ids, string.sub(chunk, 1 + a * 4, b * 4))
      table.insert(logprobs, string.sub(chunk, 1 + (length + a) * 4, (length + b) * 4))
    end
    start = start + length
  end
  return table.concat(ids), table.concat(logprobs)
end

-- The spans of a turn followed by those of new tokens, of which the first `overlap` are stored. A new entry begins
-- where the kind changes.
local function joined_spans(spans, new_spans, first, overlap)
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

-- Keeps routed experts; of two records of a turn that begin alike, the longer.
local function keep_routed(header, turn_id, start, routed)
  local key, field = string.gsub(header, 'header$', 'routed_experts'), start .. ' ' .. turn_id
  if redis.call('HSTRLEN', key, field) < #routed then redis.call('HSET', key, field, routed) end
end

-- Fails the rollout as INFRASTRUCTURE: tokens before a gap are lost.
local function fail_rollout(header)
  local now = redis.call('TIME')
  redis.call('HSET', header, 'state', 3, 'finished', now[1] .. '.' .. string.format('%06d', now[2]), 'outcome',
    '{"rewards": [], "failure_class": 3, "failure_message": "tokens before an appended chunk are missing"}')
end

local function append(header, chunks, rollout_id, turn_id, incarnation, counter, offset, chunk, turn_end, new_spans, start,
  routed)
  local turn_state = 'state:' .. turn_id
  local head = redis.call('HMGET', header, 'state', 'server', 'incarnation', turn_state)
  if not head[1] then return {'error', 'UNKNOWN_ROLLOUT', rollout_id} end
  if not head[4] then return {'error', 'UNKNOWN_TURN', turn_id} end
  local stored, inc, count, attempt, spans, ended =
    string.match(head[4], '^(%d+) (%d+) (%d+) (%S+) (%S+) ?(.*)$')
  local fresh = ended ~= '' or (head[2] == server and head[3] == inc)
  if inc ~= incarnation or count ~= counter or not fresh then
    return {'error', 'STALE_TURN', turn_id, incarnation .. '.' .. counter, inc .. '.' .. count}
  end
  if ended == '' or turn_end == '' then
    if head[1] ~= '1' then return {'error', 'FINISHED_ROLLOUT', rollout_id, head[1]} end
    if ended ~= '' then return {'error', 'ENDED_TURN', turn_id} end
  elseif turn_end ~= ended then
    return {'error', 'OTHER_END', turn_id}
  end

  stored = tonumber(stored)
  local given, first = #chunk / 8, tonumber(offset)
  -- An offset beyond an ended turn is no gap: its rollout may have finished well.
  if first > stored and ended == '' then
    fail_rollout(header)
    return {'error', 'GAP', turn_id, offset, string.format('%d', stored)}
  end
  local overlap = math.min(stored - first, given)
  if overlap > 0 then
    local ids, logprobs = string.sub(chunk, 1, given * 4), string.sub(chunk, given * 4 + 1)
    local old_ids, old_logprobs = stored_tokens(chunks, first, first + overlap)
    if old_ids ~= string.sub(ids, 1, overlap * 4) or old_logprobs ~= string.sub(logprobs, 1, overlap * 4) then
      return {'error', 'OTHER_TOKENS', turn_id, offset}
    end
    chunk = string.sub(ids, overlap * 4 + 1) .. string.sub(logprobs, overlap * 4 + 1)
  end
  if ended ~= '' then
    if overlap < given then return {'error', 'ENDED_TURN', turn_id} end
    return {stored, 0}
  end

  if start ~= '' then keep_routed(header, turn_id, start, routed) end
  local new = given - overlap
  if new > 0 then redis.call('RPUSH', chunks, chunk) end
  redis.call('HSET', header, turn_state, string.format('%d ', stored + new) .. inc .. ' ' .. count .. ' ' ..
    attempt .. ' ' .. joined_spans(spans, new_spans, first, overlap) .. (turn_end ~= '' and ' ' .. turn_end or ''))
  return {stored + new, new}
end

local results, failed = {}, {}
for i = 1, #KEYS / 2 do
  local arg = i * 10 - 8
  local chunks = KEYS[i * 2] .. ARGV[arg + 1]
  local result = failed[chunks] or append(KEYS[i * 2 - 1], chunks, unpack(ARGV, arg, arg + 9))
  if result[1] == 'error' then failed[chunks] = result end
  results[i] = result
end
return results
