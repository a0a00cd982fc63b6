-- requires: _cells
-- Those of some samples whose cell is leased under an epoch; the others are written or gone.
-- ARGV: run_id, column, epoch, sample_id...
local config, cells, leases = KEYS[1], KEYS[19], KEYS[21]
local run_id, column, epoch = unpack(ARGV, 1, 3)
if redis.call('EXISTS', config) == 0 then return {'error', 'UNKNOWN_RUN', run_id} end
local samples, lost = leased_cells(cells, leases, column, epoch, 4)
if not samples then return {'error', 'LOST_COLUMN', column, lost} end
return {'ok', samples}
