-- A page of dead letters, each after its task. ARGV: run_id, start, limit.
local config, tasks, letters = KEYS[1], KEYS[3], KEYS[17]
if redis.call('EXISTS', config) == 0 then return {'error', 'UNKNOWN_RUN', ARGV[1]} end
local page = {'ok'}
for _, letter in ipairs(redis.call('LRANGE', letters, ARGV[2], ARGV[2] + ARGV[3] - 1)) do
  table.insert(page, redis.call('HGET', tasks, cjson.decode(letter).task_id))
  table.insert(page, letter)
end
return page
