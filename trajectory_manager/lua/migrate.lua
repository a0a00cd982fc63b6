-- Turns a rollout that release 0.1 stored into today's form. Idempotent. ARGV: rollout_id.
-- 0.1 kept writers and ends in hashes, and ids, logprobs and spans of a turn in a key each.
local header, order, turns, live, kinds, segments, writers, ends, ids, logprobs, spans = unpack(KEYS)
if redis.call('HEXISTS', header, 'state') == 0 or redis.call('HEXISTS', header, 'schema') == 1 then return {'ok'} end

local function kind_index(kind)
  return redis.call('LPOS', kinds, kind) or redis.call('RPUSH', kinds, kind) - 1
end

for _, turn_id in ipairs(redis.call('LRANGE', order, 0, -1)) do
  local turn_ids = redis.call('GET', ids .. turn_id) or ''
  local turn_logprobs = redis.call('GET', logprobs .. turn_id) or ''
  local start, changes = 0, {}
  for _, span in ipairs(redis.call('LRANGE', spans .. turn_id, 0, -1)) do
    local length, kind = string.match(span, '^(%d+) (.*)$')
    table.insert(changes, string.format('%d:%d', start, kind_index(kind)))
    start = start + tonumber(length)
  end
  if start > 0 then redis.call('RPUSH', segments .. turn_id, turn_ids .. turn_logprobs) end
  local inc, count, _, attempt = string.match(redis.call('HGET', writers, turn_id), '^(%d+):(%d+):(%x+):(.*)$')
  local finish = redis.call('HGET', ends, turn_id)
  redis.call('HSET', live, turn_id, start .. ' ' .. inc .. ' ' .. count .. ' ' .. attempt .. ' ' ..
    (start > 0 and table.concat(changes, ',') or '-') .. (finish and ' ' .. finish or ''))
  redis.call('DEL', ids .. turn_id, logprobs .. turn_id, spans .. turn_id)
end
redis.call('DEL', writers, ends)
redis.call('HSET', header, 'schema', 2)
return {'ok'}
