-- requires: _admission
-- Counts of a run, in the order of RunCounts. ARGV: run_id.
local config, counters, leases, ready, letters, order, replay =
  KEYS[1], KEYS[2], KEYS[9], KEYS[13], KEYS[17], KEYS[18], KEYS[24]
local rules = redis.call('GET', config)
if not rules then return {'error', 'UNKNOWN_RUN', ARGV[1]} end
rules = cjson.decode(rules)

-- What consumers failed on since they last wrote the column.
local function column_failure(columns)
  local failures = {}
  for _, column in ipairs(columns) do
    local message = redis.call('HGET', KEYS[19], 'failure ' .. column)
    if message then table.insert(failures, message) end
  end
  return table.concat(failures, '; ')
end

local names = {
  'admitted', 'discarded', 'leased_groups', 'replaced', 'committed_step', 'leased_step', 'incomplete', 'tokens',
  'open_groups', 'training', 'column_failures'
}
local values, count = redis.call('HMGET', counters, unpack(names)), {}
for i, name in ipairs(names) do count[name] = tonumber(values[i] or 0) end
local num_ready = redis.call('LLEN', ready)
local outstanding = count.admitted - count.discarded - count.leased_groups
local limit = admission_limit(rules, count.training ~= 0, count.tokens)
-- Ready groups outside the fifo_window, as in lease_step.lua.
local window, num_outside = rules.fifo_window, 0
for _, task_id in ipairs(window > 0 and redis.call('LRANGE', ready, 0, -1) or {}) do
  local place = redis.call('ZRANK', order, task_id)
  if place and place >= window - count.open_groups then num_outside = num_outside + 1 end
end
local num_running = outstanding - num_ready - count.incomplete - count.open_groups
return {'ok', num_ready, num_running, math.max(0, limit - outstanding),
  redis.call('LLEN', KEYS[4]) + redis.call('LLEN', KEYS[5]), redis.call('ZCOUNT', leases, '(0', '+inf'),
  rules.groups_per_step, count.committed_step, count.leased_step, count.admitted, count.discarded, count.replaced,
  count.incomplete, redis.call('HLEN', replay), redis.call('LLEN', letters), count.tokens,
  num_outside, count.open_groups, count.column_failures, column_failure(rules.required_columns)}
