-- requires: _replay
-- Those of some rollouts that must not be deleted: their group is not committed, is kept for replay or replayed by a
-- leased step, or they are not settled. ARGV: run_id, rollout_id...
local config, groups, outbox, ledger, replay = KEYS[1], KEYS[8], KEYS[11], KEYS[14], KEYS[24]
if redis.call('EXISTS', config) == 0 then return {'error', 'UNKNOWN_RUN', ARGV[1]} end
local replayed, needed = groups_being_replayed(ledger), {}
for i = 2, #ARGV do
  local task_id = string.match(ARGV[i], '^(.+)/%d+/%d+$')
  local held = task_id and (replayed[task_id] or redis.call('HEXISTS', groups, task_id) == 1
    or redis.call('HEXISTS', replay, task_id) == 1)
  if held or redis.call('ZSCORE', outbox, ARGV[i]) then table.insert(needed, ARGV[i]) end
end
return {'ok', needed}
