-- Records what a step trained on. KEYS: those of the run, and of the step its summaries and values of tokens.
-- ARGV: run_id, epoch, step, how many steps are kept, the step as a row of the index has it, then sample_id, summary
-- and values of each. Returns the steps to forget.
local config, counters, steps, rows = KEYS[1], KEYS[2], KEYS[26], KEYS[27]
local summaries, tokens = KEYS[28], KEYS[29]
local run_id, epoch, step, num_kept, step_bytes = unpack(ARGV, 1, 5)
if redis.call('EXISTS', config) == 0 then return {'error', 'UNKNOWN_RUN', run_id} end
local current = redis.call('HGET', counters, 'epoch') or '0'
if current ~= epoch then return {'error', 'STALE_TRAINER', run_id, epoch, current} end
if redis.call('HGET', steps, step) ~= epoch then
  redis.call('UNLINK', summaries, tokens)
  redis.call('HSET', steps, step, epoch)
end
for i = 6, #ARGV, 3 do
  redis.call('HSET', summaries, ARGV[i], ARGV[i + 1])
  redis.call('HSET', tokens, ARGV[i], ARGV[i + 2])
  local rollout_id = string.match(ARGV[i], '^[^#]*')
  local row = redis.call('HGET', rows, rollout_id)
  if row and #row > #step_bytes then
    redis.call('HSET', rows, rollout_id, string.sub(row, 1, -1 - #step_bytes) .. step_bytes)
  end
end
local forgotten, recorded = {}, redis.call('HGETALL', steps)
for i = 1, #recorded, 2 do
  local number = tonumber(recorded[i])
  local is_old = number <= tonumber(step) - tonumber(num_kept)
  local is_undone = number > tonumber(step) and recorded[i + 1] ~= epoch
  if is_old or is_undone then table.insert(forgotten, number) end
end
return {'ok', forgotten}
