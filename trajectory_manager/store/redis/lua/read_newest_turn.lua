-- Reads the turn that began last. KEYS: header and chunks. Returns its name, its record, its state and its chunks;
-- nothing if there is none.
local turn_id = redis.call('HGET', KEYS[1], 'newest_turn')
if not turn_id then return {'ok'} end
local turn = redis.call('HMGET', KEYS[1], 'turn:' .. turn_id, 'state:' .. turn_id)
return {'ok', turn_id, turn[1], turn[2], redis.call('LRANGE', KEYS[2] .. turn_id, 0, -1)}
