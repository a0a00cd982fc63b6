-- requires: _dead_letters _cell_queue _replacements
-- Cells that are leased under an epoch and were not computed: queued again behind the others or, after `max_tries`
-- that count, their samples are replaced like those of failed rollouts.
-- ARGV: run_id, column, epoch, max_tries, max_replacements, max_dead_letters, then of each the sample_id, the message,
-- and whether the try counts (0/1).
-- Returns how many samples are replaced.
local config, counters, groups = KEYS[1], KEYS[2], KEYS[8]
local cells, queue, leases = KEYS[19], KEYS[20], KEYS[21]
local run_id, column, epoch, max_tries = unpack(ARGV, 1, 4)
local rules = redis.call('GET', config)
if not rules then return {'error', 'UNKNOWN_RUN', run_id} end
local limits = {
  required_columns = cjson.decode(rules).required_columns,
  max_replacements = tonumber(ARGV[5]), max_dead_letters = ARGV[6]
}

local function queue_again(field, sample, number)
  number = next_cell_number(string.sub(number, 1, 1) == '0')
  redis.call('ZREM', leases, field)
  redis.call('HSET', cells, field, number)
  redis.call('ZADD', queue, 0, column .. ' ' .. number .. ' ' .. sample)
end

local function give_up(sample, message)
  local task_id, index = string.match(sample, '^(.+)/(%d+)/%d+#')
  local group = cjson.decode(redis.call('HGET', groups, task_id))
  local slot = group.slots[tonumber(index) + 1]
  local num_samples = cjson.decode(redis.call('HGET', KEYS[3], task_id)).num_samples
  if group.done == num_samples then
    redis.call('HINCRBY', counters, 'incomplete', -1)
    redis.call('HINCRBY', cells, task_id, 1)
  end
  redis.call('HINCRBY', cells, task_id, -drop_cells_of_slot(slot, limits.required_columns))
  group.done, group.min_version = group.done - 1, nil
  replace_sample(task_id, tonumber(index), group, limits, message)
end

local time, num_given_up = redis.call('TIME'), 0
local now = time[1] * 1000 + time[2] / 1000
for i = 7, #ARGV, 3 do
  local sample, message, try_counts = unpack(ARGV, i, i + 2)
  local field = column .. ' ' .. sample
  local number, holder = string.match(redis.call('HGET', cells, field) or '', '^(%d+) (%d+)$')
  if holder == epoch and tonumber(redis.call('ZSCORE', leases, field) or 0) > now then
    redis.call('HSET', cells, 'failure ' .. column, message)
    redis.call('HINCRBY', counters, 'column_failures', 1)
    if redis.call('HINCRBY', cells, 'tries ' .. field, try_counts) < tonumber(max_tries) then
      queue_again(field, sample, number)
    else
      give_up(sample, message)
      num_given_up = num_given_up + 1
    end
    redis.call('HINCRBY', counters, 'version:columns', 1)
  end
end
return {'ok', num_given_up}
