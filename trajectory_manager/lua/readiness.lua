-- Counts of a run. ARGV: run_id.
local config, counters, leases, ready = KEYS[1], KEYS[2], KEYS[9], KEYS[13]
local rules = redis.call('GET', config)
if not rules then return {'refused', 'UNKNOWN_RUN', ARGV[1]} end
rules = cjson.decode(rules)
local names = {'admitted', 'discarded', 'taken', 'replaced', 'committed', 'leased'}
local values, count = redis.call('HMGET', counters, unpack(names)), {}
for i, name in ipairs(names) do count[name] = tonumber(values[i] or 0) end
local num_ready = redis.call('LLEN', ready)
local outstanding = count.admitted - count.discarded - count.taken
local free = rules.groups_per_step * (rules.max_staleness + 1) - outstanding
return {'ok', num_ready, outstanding - num_ready, math.max(0, free),
  redis.call('LLEN', KEYS[4]) + redis.call('LLEN', KEYS[5]), redis.call('ZCARD', leases),
  rules.groups_per_step, count.committed, count.leased, count.admitted, count.discarded, count.replaced}
