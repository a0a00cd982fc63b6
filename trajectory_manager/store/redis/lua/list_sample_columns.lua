-- Samples of finished rollouts whose group is not committed, by name of the group.
-- ARGV: run_id, name to start after, limit in groups. Returns sample_id, group, step, written columns,
-- leased columns of each sample.
local config, groups, ledger, cells, leases = KEYS[1], KEYS[8], KEYS[14], KEYS[19], KEYS[21]
local rules = redis.call('GET', config)
if not rules then return {'error', 'UNKNOWN_RUN', ARGV[1]} end
local required = cjson.decode(rules).required_columns
local time = redis.call('TIME')
local now = time[1] * 1000 + time[2] / 1000
local steps = {}
local entries = redis.call('HGETALL', ledger)
for i = 1, #entries, 2 do
  for _, task_id in ipairs(cjson.decode(entries[i + 1]).groups) do steps[task_id] = entries[i] end
end
local names = {}
for _, task_id in ipairs(redis.call('HKEYS', groups)) do
  if task_id > ARGV[2] then table.insert(names, task_id) end
end
table.sort(names)

local function columns_of(sample, is_complete)
  local written, leased = {}, {}
  for _, column in ipairs(required) do
    local field = column .. ' ' .. sample
    local cell = redis.call('HGET', cells, field)
    if cell and string.sub(cell, 1, 1) == '=' or not cell and is_complete then
      table.insert(written, column)
    elseif tonumber(redis.call('ZSCORE', leases, field) or 0) > now then
      table.insert(leased, column)
    end
  end
  return written, leased
end

local rows, num_groups, limit = {}, 0, tonumber(ARGV[3])
for _, task_id in ipairs(names) do
  if num_groups == limit then break end
  local group, before = cjson.decode(redis.call('HGET', groups, task_id)), #rows
  for _, slot in ipairs(group.purpose == '1' and group.slots or {}) do
    for _, sample in ipairs(slot.samples or {}) do
      -- min_version is set when a TRAIN group is complete.
      table.insert(rows, {sample, task_id, steps[task_id] or '0', columns_of(sample, group.min_version)})
    end
  end
  if #rows > before then num_groups = num_groups + 1 end
end
return {'ok', rows}
