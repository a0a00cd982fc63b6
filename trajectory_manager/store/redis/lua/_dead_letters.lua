-- Dead letters: groups that leave the run without being trained. The values equal DeadLetterReason.
local FAILURES, DROPPED, WITHHELD, ZERO_VARIANCE, DELIVERIES, REJECTED = 1, 2, 3, 4, 5, 6

-- Moves a group to the dead letters, of which the newest `limit` are kept. `step` is the committed step from which
-- retention counts. The caller updates the counters.
local function dead_letter(task_id, group, reason, message, step, limit)
  local groups, letters, order, ended = KEYS[8], KEYS[17], KEYS[18], KEYS[22]
  local time, attempts, record = redis.call('TIME'), {}, {task_id}
  for i, slot in ipairs(group.slots) do attempts[i], record[i + 1] = slot.attempt, slot.attempt end
  redis.call('RPUSH', letters, cjson.encode({
    task_id = task_id, reason = reason, message = message, attempts = attempts,
    time = time[1] + time[2] / 1000000
  }))
  redis.call('LTRIM', letters, -limit, -1)
  redis.call('ZADD', ended, step, cjson.encode(record))
  redis.call('ZREM', order, task_id)
  redis.call('HDEL', groups, task_id)
end
