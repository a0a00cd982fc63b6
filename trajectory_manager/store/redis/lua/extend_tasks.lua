-- Extends task leases. ARGV: run_id, then rollout_id and nonce of each. Returns 1 for each that is held, else 0.
local config, leases, nonces = KEYS[1], KEYS[9], KEYS[10]
local rules = redis.call('GET', config)
if not rules then return {'error', 'UNKNOWN_RUN', ARGV[1]} end
local time = redis.call('TIME')
local now = time[1] * 1000 + time[2] / 1000
local expires, held = now + cjson.decode(rules).lease_seconds * 1000, {}
for i = 2, #ARGV, 2 do
  local score = redis.call('ZSCORE', leases, ARGV[i])
  local ok = score and tonumber(score) > now and redis.call('HGET', nonces, ARGV[i]) == ARGV[i + 1]
  if ok then redis.call('ZADD', leases, expires, ARGV[i]) end
  table.insert(held, ok and 1 or 0)
end
return {'ok', held}
