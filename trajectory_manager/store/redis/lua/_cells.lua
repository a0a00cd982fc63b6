-- Cells of columns: see RUN_PARTS in keys.py.

-- Those of the samples ARGV[first...] whose cell of `column` is leased under `epoch`; the cells of the others are
-- written under it, or gone because their group is ready. Otherwise nil and the sample whose lease is lost.
local function leased_cells(cells, leases, column, epoch, first)
  local time = redis.call('TIME')
  local now, samples = time[1] * 1000 + time[2] / 1000, {}
  for i = first, #ARGV do
    local field = column .. ' ' .. ARGV[i]
    local cell = redis.call('HGET', cells, field)
    if cell and cell ~= '=' .. epoch then
      local expires = tonumber(redis.call('ZSCORE', leases, field) or 0)
      if string.match(cell, '^%d+ (%d+)$') ~= epoch or expires <= now then return nil, ARGV[i] end
      table.insert(samples, ARGV[i])
    end
  end
  return samples
end
