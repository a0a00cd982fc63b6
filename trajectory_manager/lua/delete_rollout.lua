-- Deletes a closed rollout with all that is stored with it. Idempotent. KEYS: those of a rollout, columns.
-- Answers 'gone', 'running', or 'deleted' and how many tokens it had.
local header, order, turns, live, kinds, segments, columns = unpack(KEYS)
local stored = redis.call('HMGET', header, 'state', 'schema')
if not stored[1] then return {'ok', 'gone'} end
if not stored[2] then return {'refused', 'OLD_SCHEMA'} end
if stored[1] == '1' then return {'ok', 'running'} end
local num_tokens = 0
for _, turn_id in ipairs(redis.call('LRANGE', order, 0, -1)) do
  num_tokens = num_tokens + tonumber(string.match(redis.call('HGET', live, turn_id), '^%d+'))
  redis.call('UNLINK', segments .. turn_id)
end
redis.call('UNLINK', header, order, turns, live, kinds, columns)
return {'ok', 'deleted', num_tokens}
