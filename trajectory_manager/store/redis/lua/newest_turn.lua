-- Reads the turn that began last. KEYS: header and segments. Answers its name, the turn as it is stored, its live
-- state and its segments; nothing if there is none.
local head = redis.call('HMGET', KEYS[1], 'state', 'schema', 'newest_turn')
if head[1] and not head[2] then return {'refused', 'OLD_SCHEMA'} end
local turn_id = head[3]
if not turn_id then return {'ok'} end
local turn = redis.call('HMGET', KEYS[1], 'turn:' .. turn_id, 'live:' .. turn_id)
return {'ok', turn_id, turn[1], turn[2], redis.call('LRANGE', KEYS[2] .. turn_id, 0, -1)}
