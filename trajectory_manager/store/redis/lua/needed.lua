-- Which rollouts somebody needs. ARGV: run_id, rollout_id... Answers them.
-- Of a group that is not committed, of one that may be replayed or that a leased step replays, or not settled.
local config, groups, marks, ledger, replay = KEYS[1], KEYS[8], KEYS[11], KEYS[14], KEYS[24]
if redis.call('EXISTS', config) == 0 then return {'refused', 'UNKNOWN_RUN', ARGV[1]} end
local replayed = {}
for _, entry in ipairs(redis.call('HVALS', ledger)) do
  for _, sample in ipairs(cjson.decode(entry).replayed) do
    replayed[string.match(sample, '^(.+)/%d+/%d+#')] = true
  end
end
local needed = {}
for i = 2, #ARGV do
  local task_id = string.match(ARGV[i], '^(.+)/%d+/%d+$')
  local held = task_id and (replayed[task_id] or redis.call('HEXISTS', groups, task_id) == 1
    or redis.call('HEXISTS', replay, task_id) == 1)
  if held or redis.call('ZSCORE', marks, ARGV[i]) then table.insert(needed, ARGV[i]) end
end
return {'ok', needed}
