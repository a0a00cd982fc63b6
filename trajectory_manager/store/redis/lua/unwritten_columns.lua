-- Which of some samples have a cell that is leased under an epoch; the others are written.
-- ARGV: run_id, column, epoch, sample_id... Answers those samples.
local config, cells, leases = KEYS[1], KEYS[19], KEYS[21]
local column, epoch = ARGV[2], ARGV[3]
if redis.call('EXISTS', config) == 0 then return {'refused', 'UNKNOWN_RUN', ARGV[1]} end
local time = redis.call('TIME')
local now, unwritten = time[1] * 1000 + time[2] / 1000, {}
for i = 4, #ARGV do
  local field = column .. ' ' .. ARGV[i]
  local cell = redis.call('HGET', cells, field)
  -- A cell that is gone belongs to a group that is ready: what was written is with its rollout.
  if cell and cell ~= '=' .. epoch then
    local expires = tonumber(redis.call('ZSCORE', leases, field) or 0)
    if string.match(cell, '^%d+ (%d+)$') ~= epoch or expires <= now then
      return {'refused', 'LOST_COLUMN', column, ARGV[i]}
    end
    table.insert(unwritten, ARGV[i])
  end
end
return {'ok', unwritten}
