-- Replay: groups that later steps may train again.

-- Stores a group as "step mean_reward {group}"; the mean is "-" if no rollout has the reward.
local function keep_for_replay(replay, rules, task_id, group, step)
  local sum, count = 0, 0
  for _, slot in ipairs(group.slots) do
    local reward = slot.state == 'done' and slot.rewards and slot.rewards[rules.replay.reward_name]
    if reward then sum, count = sum + tonumber(reward), count + 1 end
  end
  local mean = count > 0 and string.format('%.17g', sum / count) or '-'
  redis.call('HSET', replay, task_id, string.format('%d %s %s', step, mean, cjson.encode(group)))
end

-- The groups that leased steps replay, as a set. They may have left the replay buffer since.
local function groups_being_replayed(ledger)
  local found = {}
  for _, entry in ipairs(redis.call('HVALS', ledger)) do
    for _, sample in ipairs(cjson.decode(entry).replayed) do
      found[string.match(sample, '^(.+)/%d+/%d+#')] = true
    end
  end
  return found
end
