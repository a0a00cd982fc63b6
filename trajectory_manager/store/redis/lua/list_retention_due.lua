-- requires: _replay
-- The oldest groups that ended more than retention_steps ago and that no step may replay.
-- ARGV: run_id, limit. Returns '["task_id", attempts of each slot...]' of each.
local config, counters, ledger, ended, replay = KEYS[1], KEYS[2], KEYS[14], KEYS[22], KEYS[24]
local rules = redis.call('GET', config)
if not rules then return {'error', 'UNKNOWN_RUN', ARGV[1]} end
local steps = cjson.decode(rules).retention_steps
if steps == 0 then return {'ok', {}} end
local last = tonumber(redis.call('HGET', counters, 'committed_step') or 0) - steps - 1
local replayed = groups_being_replayed(ledger)
local due, limit, start, page = {}, tonumber(ARGV[2]), 0, nil
repeat
  page = redis.call('ZRANGEBYSCORE', ended, '-inf', last, 'LIMIT', start, limit)
  for _, group in ipairs(page) do
    local task_id = cjson.decode(group)[1]
    local held = replayed[task_id] or redis.call('HEXISTS', replay, task_id) == 1
    if #due < limit and not held then table.insert(due, group) end
  end
  start = start + limit
until #page < limit or #due == limit
return {'ok', due}
