-- requires: _admission _task_leases
-- Leases one open slot, admitting a group if none is open. ARGV: run_id, nonce, purpose...
-- Returns the rollout, its task and the seconds of the lease; or an EmptyReason. The nonce of a lease that is held
-- gets that lease again.
local tasks, groups = KEYS[3], KEYS[8]
local queues = {['1'] = KEYS[4], ['2'] = KEYS[5]}
local open_slots = {['1'] = KEYS[6], ['2'] = KEYS[7]}
local run = read_run()
if not run then return {'error', 'UNKNOWN_RUN', ARGV[1]} end
local held = held_lease(run, ARGV[2])
if held then return held end
if run.ended then return {'ok', RUN_ENDED} end

local function admit(purpose)
  if purpose == '1' and closed_by(run) then return nil end
  local entry = redis.call('LPOP', queues[purpose])
  if not entry then return nil end
  local task_id, rest = string.match(entry, '^(%S+)(.*)$')
  -- A requeued dead letter continues after the attempts it had.
  local attempts = {}
  for attempt in string.gmatch(rest, '%d+') do table.insert(attempts, tonumber(attempt)) end
  local number = cjson.decode(redis.call('HGET', tasks, task_id)).num_samples
  local group = admitted_group(run, task_id, purpose, number, attempts)
  for slot = 2, #group.slots do redis.call('RPUSH', open_slots[purpose], task_id .. '/' .. (slot - 1)) end
  return task_id, 1, group
end

local function next_slot(purpose)
  while true do
    local name = redis.call('LPOP', open_slots[purpose])
    if not name then return admit(purpose) end
    local task_id, slot = string.match(name, '^(.+)/(%d+)$')
    local group = redis.call('HGET', groups, task_id)
    -- The group may have ended or completed since the slot was opened.
    if group then
      group, slot = cjson.decode(group), tonumber(slot) + 1
      if group.slots[slot].state == 'open' then return task_id, slot, group end
    end
  end
end

local reason = NOTHING_QUEUED
for i = 3, #ARGV do
  local task_id, slot, group = next_slot(ARGV[i])
  if task_id then return lease_slot(run, task_id, slot, group, ARGV[2]) end
  if ARGV[i] == '1' and redis.call('LLEN', queues['1']) > 0 then reason = closed_by(run) end
end
return {'ok', reason}
