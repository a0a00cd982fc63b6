-- Stores the value of a cell with its rollout, or checks that it is stored.
-- KEYS: header, columns. ARGV: rollout_id, column, sample_id, epoch, new (0/1), values.
local header, columns = KEYS[1], KEYS[2]
local rollout_id, column, sample_id, epoch, new, values = unpack(ARGV)
if redis.call('EXISTS', header) == 0 then return {'error', 'UNKNOWN_ROLLOUT', rollout_id} end
local field = column .. ' ' .. sample_id
local stored = redis.call('HGET', columns, field) or '0:'
local colon = string.find(stored, ':', 1, true)
local by, given = tonumber(string.sub(stored, 1, colon - 1)), tonumber(epoch)
if by > given or (by < given and new ~= '1') then
  return {'error', 'LOST_COLUMN', column, sample_id}
end
if by == given then
  if string.sub(stored, colon + 1) == values then return {'ok'} end
  return {'error', 'OTHER_COLUMN', column, sample_id}
end
redis.call('HSET', columns, field, epoch .. ':' .. values)
return {'ok'}
