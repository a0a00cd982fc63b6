-- Queues cells that are leased under an epoch again, unwritten. ARGV: run_id, column, epoch, sample_id...
-- Returns how many.
local config, counters, cells, queue, leases = KEYS[1], KEYS[2], KEYS[19], KEYS[20], KEYS[21]
local run_id, column, epoch = unpack(ARGV, 1, 3)
if redis.call('EXISTS', config) == 0 then return {'error', 'UNKNOWN_RUN', run_id} end
local returned = 0
for i = 4, #ARGV do
  local field = column .. ' ' .. ARGV[i]
  local number, holder = string.match(redis.call('HGET', cells, field) or '', '^(%d+) (%d+)$')
  if holder == epoch then
    redis.call('ZREM', leases, field)
    redis.call('HSET', cells, field, number)
    redis.call('ZADD', queue, 0, column .. ' ' .. number .. ' ' .. ARGV[i])
    returned = returned + 1
  end
end
if returned > 0 then redis.call('HINCRBY', counters, 'version:columns', 1) end
return {'ok', returned}
