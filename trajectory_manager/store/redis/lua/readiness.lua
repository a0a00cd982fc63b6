-- Counts of a run. ARGV: run_id.
local config, counters, leases, ready, dead, order, replay =
  KEYS[1], KEYS[2], KEYS[9], KEYS[13], KEYS[17], KEYS[18], KEYS[24]
local rules = redis.call('GET', config)
if not rules then return {'refused', 'UNKNOWN_RUN', ARGV[1]} end
rules = cjson.decode(rules)
local names = {
  'admitted', 'discarded', 'taken', 'replaced', 'committed', 'leased', 'incomplete', 'tokens',
  'open', 'training'
}
local values, count = redis.call('HMGET', counters, unpack(names)), {}
for i, name in ipairs(names) do count[name] = tonumber(values[i] or 0) end
local num_ready = redis.call('LLEN', ready)
local outstanding = count.admitted - count.discarded - count.taken
-- As in lease_task.
local full = rules.staleness_policy == 2 or count.training == 0
local limit = rules.groups_per_step * (rules.max_staleness + (full and 1 or 0))
local cap = rules.max_stored_tokens
if cap > 0 and count.tokens > cap then
  limit = rules.retention_steps > 0 and math.min(limit, rules.groups_per_step) or 0
end
-- As in lease_samples.
local window, kept_back = rules.fifo_window, 0
for _, task_id in ipairs(window > 0 and redis.call('LRANGE', ready, 0, -1) or {}) do
  local place = redis.call('ZRANK', order, task_id)
  if place and place >= window - count.open then kept_back = kept_back + 1 end
end
local num_running = outstanding - num_ready - count.incomplete - count.open
return {'ok', num_ready, num_running, math.max(0, limit - outstanding),
  redis.call('LLEN', KEYS[4]) + redis.call('LLEN', KEYS[5]), redis.call('ZCOUNT', leases, '(0', '+inf'),
  rules.groups_per_step, count.committed, count.leased, count.admitted, count.discarded, count.replaced,
  count.incomplete, redis.call('HLEN', replay), redis.call('LLEN', dead), count.tokens,
  kept_back, count.open}
