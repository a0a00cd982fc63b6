-- A page of dead letters, each after its task. ARGV: run_id, start, limit, whether from the newest on (0/1).
local config, tasks, letters = KEYS[1], KEYS[3], KEYS[17]
if redis.call('EXISTS', config) == 0 then return {'error', 'UNKNOWN_RUN', ARGV[1]} end
local page = {'ok'}
local first, last = tonumber(ARGV[2]), ARGV[2] + ARGV[3] - 1
if ARGV[4] == '1' then first, last = -1 - last, -1 - first end
local found = redis.call('LRANGE', letters, first, last)
for i = 1, #found do
  local letter = found[ARGV[4] == '1' and #found + 1 - i or i]
  table.insert(page, redis.call('HGET', tasks, cjson.decode(letter).task_id))
  table.insert(page, letter)
end
return page
