-- Queues the tasks of dead letters again, to continue after the attempts they had. ARGV: run_id, task_id...
-- Returns how many; tasks that are no dead letters and agents' own ones are skipped.
local config, counters, tasks, letters, ended = KEYS[1], KEYS[2], KEYS[3], KEYS[17], KEYS[22]
local queues = {[1] = KEYS[4], [2] = KEYS[5]}
if redis.call('EXISTS', config) == 0 then return {'error', 'UNKNOWN_RUN', ARGV[1]} end
local requested, number = {}, 0
for i = 2, #ARGV do requested[ARGV[i]] = true end
for i, text in ipairs(redis.call('LRANGE', letters, 0, -1)) do
  local letter = cjson.decode(text)
  local task = requested[letter.task_id] and cjson.decode(redis.call('HGET', tasks, letter.task_id))
  if task and not task.own then
    local entry = letter.task_id .. ' ' .. table.concat(letter.attempts, ' ')
    redis.call('RPUSH', queues[task.purpose], entry)
    redis.call('LSET', letters, i - 1, '')
    -- The record of the next group of this task covers these attempts.
    table.insert(letter.attempts, 1, letter.task_id)
    redis.call('ZREM', ended, cjson.encode(letter.attempts))
    number = number + 1
  end
end
if number > 0 then
  redis.call('LREM', letters, 0, '')
  redis.call('HINCRBY', counters, 'version:tasks', 1)
end
return {'ok', number}
