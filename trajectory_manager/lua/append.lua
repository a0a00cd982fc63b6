-- Appends tokens at an offset, behind the fence.
-- ARGV: rollout_id, turn_id, incarnation, counter, offset, ids, logprobs, gap outcome, span...
-- A span is "num_tokens origin version source server"; ids and logprobs take 4 bytes a token.
local header, _, _, writers, ends, ids, logprobs, spans = unpack(KEYS)
local rollout_id, turn_id, incarnation, counter, offset, new_ids, new_logprobs, gap_outcome = unpack(ARGV)
local state = redis.call('HGET', header, 'state')
if not state then return {'refused', 'UNKNOWN_ROLLOUT', rollout_id} end
local writer = redis.call('HGET', writers, turn_id)
if not writer then return {'refused', 'UNKNOWN_TURN', turn_id} end
local inc, count, server = string.match(writer, '^(%d+):(%d+):(%x+):')
local current = string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
local fresh = inc == incarnation and count == counter and server == current
if not fresh then return {'refused', 'STALE_TURN', turn_id, incarnation .. '.' .. counter, inc .. '.' .. count} end
if state ~= '1' then return {'refused', 'CLOSED_ROLLOUT', rollout_id, state} end
if redis.call('HEXISTS', ends, turn_id) == 1 then return {'refused', 'CLOSED_TURN', turn_id} end

offset = tonumber(offset)
local stored, given = redis.call('STRLEN', ids) / 4, #new_ids / 4
if offset > stored then
  local now = redis.call('TIME')
  redis.call('HSET', header, 'state', 3, 'outcome', gap_outcome,
    'finished', now[1] .. '.' .. string.format('%06d', now[2]))
  return {'refused', 'GAP', turn_id, ARGV[5], string.format('%d', stored)}
end
local overlap = math.min(stored - offset, given)
if overlap > 0 then
  local first, last = offset * 4, (offset + overlap) * 4 - 1
  if redis.call('GETRANGE', ids, first, last) ~= string.sub(new_ids, 1, overlap * 4)
    or redis.call('GETRANGE', logprobs, first, last) ~= string.sub(new_logprobs, 1, overlap * 4) then
    return {'refused', 'OTHER_TOKENS', turn_id, ARGV[5]}
  end
  if overlap == given then return {'ok', stored, 0} end
  new_ids, new_logprobs = string.sub(new_ids, overlap * 4 + 1), string.sub(new_logprobs, overlap * 4 + 1)
end
redis.call('APPEND', ids, new_ids)
redis.call('APPEND', logprobs, new_logprobs)

local skip = overlap
for i = 9, #ARGV do
  local length, kind = string.match(ARGV[i], '^(%d+) (.*)$')
  local skipped = math.min(skip, tonumber(length))
  skip, length = skip - skipped, tonumber(length) - skipped
  if length > 0 then
    local last = redis.call('LINDEX', spans, -1)
    local last_length, last_kind
    if last then last_length, last_kind = string.match(last, '^(%d+) (.*)$') end
    if last_kind == kind then
      redis.call('LSET', spans, -1, string.format('%d ', tonumber(last_length) + length) .. kind)
    else
      redis.call('RPUSH', spans, string.format('%d ', length) .. kind)
    end
  end
end
return {'ok', stored + given - overlap, given - overlap}
