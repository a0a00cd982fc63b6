-- Marks leased cells as written, all or none; a group that misses none any more is ready.
-- ARGV: run_id, column, epoch, sample_id... Answers how many were new, and how many groups became ready.
-- Skips cells that are written under the epoch, and those that are gone: their group is ready.
local config, counters, groups, ready = KEYS[1], KEYS[2], KEYS[8], KEYS[13]
local cells, leases = KEYS[19], KEYS[21]
local column, epoch = ARGV[2], ARGV[3]
local rules = redis.call('GET', config)
if not rules then return {'refused', 'UNKNOWN_RUN', ARGV[1]} end
rules = cjson.decode(rules)
local time = redis.call('TIME')
local now, samples = time[1] * 1000 + time[2] / 1000, {}
for i = 4, #ARGV do
  local field = column .. ' ' .. ARGV[i]
  local cell = redis.call('HGET', cells, field)
  if cell and cell ~= '=' .. epoch then
    local expires = tonumber(redis.call('ZSCORE', leases, field) or 0)
    if string.match(cell, '^%d+ (%d+)$') ~= epoch or expires <= now then
      return {'refused', 'LOST_COLUMN', column, ARGV[i]}
    end
    table.insert(samples, ARGV[i])
  end
end

local function make_ready(task_id)
  redis.call('HDEL', cells, task_id)
  for _, slot in ipairs(cjson.decode(redis.call('HGET', groups, task_id)).slots) do
    for _, sample in ipairs(slot.samples or {}) do
      for _, name in ipairs(rules.required_columns) do redis.call('HDEL', cells, name .. ' ' .. sample) end
    end
  end
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
if #samples > 0 then redis.call('HINCRBY', counters, 'version:columns', 1) end
return {'ok', #samples, num_ready}
