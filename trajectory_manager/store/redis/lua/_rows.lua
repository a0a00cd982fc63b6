-- Rows of the index of rollouts. Those with numbers up to the floor have none any more.

-- Adds the row of a rollout that was started and has none.
local function keep_row(rollout_id, row)
  local number = redis.call('ZSCORE', KEYS[12], rollout_id)
  local floor = redis.call('HGET', KEYS[2], 'rows_floor') or 0
  if number and tonumber(number) > tonumber(floor) then redis.call('HSETNX', KEYS[27], rollout_id, row) end
end
