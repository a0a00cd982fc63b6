-- requires: _rows
-- Adds rows of rollouts that lack one. ARGV: run_id, then rollout_id and row of each; '-': it was deleted, unless it
-- has a lease and is about to start.
local config, leases = KEYS[1], KEYS[9]
if redis.call('EXISTS', config) == 0 then return {'error', 'UNKNOWN_RUN', ARGV[1]} end
for i = 2, #ARGV, 2 do
  if ARGV[i + 1] ~= '-' or not redis.call('ZSCORE', leases, ARGV[i]) then keep_row(ARGV[i], ARGV[i + 1]) end
end
return {'ok'}
