-- Turns a rollout that release 0.1 stored into today's form. Idempotent. KEYS: today's, then those of 0.1.
-- 0.1 kept turns, writers and ends in hashes, their order in a list, and ids, logprobs and spans of a turn in a key each.
local header, segments, order, turns, writers, ends, ids, logprobs, spans = unpack(KEYS)
if redis.call('HEXISTS', header, 'state') == 0 or redis.call('HEXISTS', header, 'schema') == 1 then return {'ok'} end

local names = redis.call('LRANGE', order, 0, -1)
for number, turn_id in ipairs(names) do
  local turn_ids = redis.call('GET', ids .. turn_id) or ''
  local turn_logprobs = redis.call('GET', logprobs .. turn_id) or ''
  local start, last, changes = 0, nil, {}
  for _, span in ipairs(redis.call('LRANGE', spans .. turn_id, 0, -1)) do
    local length, origin, version, source, server = string.match(span, '^(%d+) (%d+) (%d+) (%d+) (%S*)$')
    local kind = table.concat({origin, version, source, server}, ':')
    if kind ~= last then table.insert(changes, string.format('%d:', start) .. kind) end
    start, last = start + tonumber(length), kind
  end
  if start > 0 then redis.call('RPUSH', segments .. turn_id, turn_ids .. turn_logprobs) end
  local inc, count, _, attempt = string.match(redis.call('HGET', writers, turn_id), '^(%d+):(%d+):(%x+):(.*)$')
  local finish, opening = redis.call('HGET', ends, turn_id), redis.call('HGET', turns, turn_id)
  redis.call('HSET', header,
    'turn:' .. turn_id, string.format('%d ', number) .. cjson.decode(opening).prompt_digest .. ' ' .. opening,
    'live:' .. turn_id, start .. ' ' .. inc .. ' ' .. count .. ' ' .. attempt .. ' ' ..
      (start > 0 and table.concat(changes, ',') or '-') .. (finish and ' ' .. finish or ''),
    'num_turns', number, 'newest_turn', turn_id)
  redis.call('DEL', ids .. turn_id, logprobs .. turn_id, spans .. turn_id)
end
redis.call('DEL', order, turns, writers, ends)
redis.call('HSET', header, 'schema', 2)
return {'ok'}
