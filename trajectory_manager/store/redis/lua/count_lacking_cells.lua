-- Samples whose cell of a column is queued or leased, and rollouts that run. ARGV: run_id, column.
local config, queue, leases = KEYS[1], KEYS[20], KEYS[21]
local run_id, column = unpack(ARGV)
if redis.call('EXISTS', config) == 0 then return {'error', 'UNKNOWN_RUN', run_id} end
local lacking = redis.call('ZLEXCOUNT', queue, '[' .. column .. ' ', '(' .. column .. '!')
for _, field in ipairs(redis.call('ZRANGE', leases, 0, -1)) do
  if string.match(field, '^%S+') == column then lacking = lacking + 1 end
end
return {'ok', lacking, redis.call('ZCOUNT', KEYS[9], '(0', '+inf')}
