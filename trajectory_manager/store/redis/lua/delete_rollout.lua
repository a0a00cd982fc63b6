-- Deletes a finished rollout with its tokens, columns and routed experts. Idempotent. KEYS: those of a rollout,
-- columns, routed experts.
-- Returns 'gone', 'running', or 'deleted' and how many tokens it had.
local header, chunks, columns, routed = unpack(KEYS)
local state = redis.call('HGET', header, 'state')
if not state then return {'ok', 'gone'} end
if state == '1' then return {'ok', 'running'} end
local num_tokens, fields = 0, redis.call('HGETALL', header)
for i = 1, #fields, 2 do
  local turn_id = string.match(fields[i], '^state:(.*)$')
  if turn_id then
    num_tokens = num_tokens + tonumber(string.match(fields[i + 1], '^%d+'))
    redis.call('UNLINK', chunks .. turn_id)
  end
end
redis.call('UNLINK', header, columns, routed)
return {'ok', 'deleted', num_tokens}
