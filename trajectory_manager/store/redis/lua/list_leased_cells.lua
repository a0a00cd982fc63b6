-- requires: _cells
-- Those of some samples whose cell is leased under an epoch, and those that no group needs any more; the others are
-- written or gone. ARGV: run_id, column, epoch, sample_id...
local config, groups, cells, leases = KEYS[1], KEYS[8], KEYS[19], KEYS[21]
local run_id, column, epoch = unpack(ARGV, 1, 3)
if redis.call('EXISTS', config) == 0 then return {'error', 'UNKNOWN_RUN', run_id} end
local samples, lost = leased_cells(cells, leases, column, epoch, 4)
if not samples then return {'error', 'LOST_COLUMN', column, lost} end

-- Its group is committed or discarded, or is one of a requeued task, with later attempts; or it is replaced.
local function is_unneeded(sample)
  local task_id, index, attempt = string.match(sample, '^(.+)/(%d+)/(%d+)#')
  if not task_id or redis.call('HEXISTS', cells, column .. ' ' .. sample) == 1 then return false end
  local group = redis.call('HGET', groups, task_id)
  local slot = group and cjson.decode(group).slots[tonumber(index) + 1]
  return not slot or slot.attempt ~= tonumber(attempt) or slot.state == 'open'
end

local unneeded = {}
for i = 4, #ARGV do
  if is_unneeded(ARGV[i]) then table.insert(unneeded, ARGV[i]) end
end
return {'ok', samples, unneeded}
