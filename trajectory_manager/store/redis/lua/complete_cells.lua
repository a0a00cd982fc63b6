-- requires: _cells _cell_queue
-- Marks leased cells as written, all or none; a group whose cells are all written becomes ready.
-- ARGV: run_id, column, epoch, sample_id... Returns how many cells were new, and how many groups became ready.
local config, counters, groups, ready = KEYS[1], KEYS[2], KEYS[8], KEYS[13]
local cells, leases = KEYS[19], KEYS[21]
local run_id, column, epoch = unpack(ARGV, 1, 3)
local rules = redis.call('GET', config)
if not rules then return {'error', 'UNKNOWN_RUN', run_id} end
rules = cjson.decode(rules)
local samples, lost = leased_cells(cells, leases, column, epoch, 4)
if not samples then return {'error', 'LOST_COLUMN', column, lost} end

local function make_ready(task_id)
  drop_cells(task_id, cjson.decode(redis.call('HGET', groups, task_id)), rules.required_columns)
  redis.call('RPUSH', ready, task_id)
  redis.call('HINCRBY', counters, 'incomplete', -1)
  redis.call('HINCRBY', counters, 'version:ready', 1)
end

local num_ready = 0
for _, sample in ipairs(samples) do
  local field = column .. ' ' .. sample
  redis.call('ZREM', leases, field)
  redis.call('HSET', cells, field, '=' .. epoch)
  local task_id = string.match(sample, '^(.+)/%d+/%d+#')
  if redis.call('HINCRBY', cells, task_id, -1) == 0 then
    make_ready(task_id)
    num_ready = num_ready + 1
  end
end
if #samples > 0 then
  redis.call('HDEL', cells, 'failure ' .. column)
  redis.call('HINCRBY', counters, 'version:columns', 1)
end
return {'ok', #samples, num_ready}
