-- Groups whose oldest token is too old for the step that they would be trained in.

local function is_too_old(rules, group, base)
  local MASK = 3
  return rules.staleness_policy ~= MASK and base - group.min_version > rules.max_staleness
end

-- The group becomes a dead letter, and under WITHHOLD is kept for replay.
local function dead_letter_stale(rules, task_id, group, step, base, limit)
  local WITHHOLD, counters = 4, KEYS[2]
  local withheld = rules.staleness_policy == WITHHOLD
  local message = string.format(
    '%d versions old for step %d: its oldest token has %d, the step begins with %d',
    base - group.min_version, step, group.min_version, base)
  local committed = redis.call('HGET', counters, 'committed_step') or 0
  dead_letter(task_id, group, withheld and WITHHELD or DROPPED, message, committed, limit)
  if withheld and type(rules.replay) == 'table' then keep_for_replay(KEYS[24], rules, task_id, group, step) end
  redis.call('LREM', KEYS[13], 1, task_id)
  redis.call('HINCRBY', counters, 'discarded', 1)
end
