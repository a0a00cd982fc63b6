-- Deletes a closed rollout with all that is stored with it. Idempotent. KEYS: those of a rollout, columns.
-- Answers 'gone', 'running', or 'deleted' and how many tokens it had.
local header, segments, columns = unpack(KEYS)
local stored = redis.call('HMGET', header, 'state', 'schema')
if not stored[1] then return {'ok', 'gone'} end
if not stored[2] then return {'refused', 'OLD_SCHEMA'} end
if stored[1] == '1' then return {'ok', 'running'} end
local num_tokens, fields = 0, redis.call('HGETALL', header)
for i = 1, #fields, 2 do
  local turn_id = string.match(fields[i], '^live:(.*)$')
  if turn_id then
    num_tokens = num_tokens + tonumber(string.match(fields[i + 1], '^%d+'))
    redis.call('UNLINK', segments .. turn_id)
  end
end
redis.call('UNLINK', header, columns)
return {'ok', 'deleted', num_tokens}
