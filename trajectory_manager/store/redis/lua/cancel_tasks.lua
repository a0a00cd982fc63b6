-- Takes back EVAL tasks that are not complete; the sweep finishes their running rollouts. ARGV: run_id, task_id...
-- Returns how many.
local config, queue, open_slots, groups, leases, nonces = KEYS[1], KEYS[5], KEYS[7], KEYS[8], KEYS[9], KEYS[10]
if redis.call('EXISTS', config) == 0 then return {'error', 'UNKNOWN_RUN', ARGV[1]} end

local function end_group(task_id, group)
  for i, slot in ipairs(group.slots) do
    local name = string.format('%s/%d/%d', task_id, i - 1, slot.attempt)
    redis.call('ZADD', leases, 'XX', 0, name)
    local nonce = redis.call('HGET', nonces, name)
    if nonce then redis.call('HDEL', nonces, name, nonce) end
    redis.call('LREM', open_slots, 0, task_id .. '/' .. (i - 1))
  end
  redis.call('HDEL', groups, task_id)
end

local number = 0
for i = 2, #ARGV do
  local task_id = ARGV[i]
  local encoded = redis.call('HGET', groups, task_id)
  local group = encoded and cjson.decode(encoded)
  if group and group.purpose == '2' then
    end_group(task_id, group)
    number = number + 1
  elseif not group and redis.call('LREM', queue, 0, task_id) > 0 then
    number = number + 1
  end
end
return {'ok', number}
