-- Reads the turn that began last. KEYS: header and segments. Answers its name, the turn as it is stored, its live
-- state and its segments; nothing if there is none.
local turn_id = redis.call('HGET', KEYS[1], 'newest_turn')
if not turn_id then return {'ok'} end
local turn = redis.call('HMGET', KEYS[1], 'turn:' .. turn_id, 'live:' .. turn_id)
return {'ok', turn_id, turn[1], turn[2], redis.call('LRANGE', KEYS[2] .. turn_id, 0, -1)}
