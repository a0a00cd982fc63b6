-- requires: _admission _task_leases
-- Leases one open slot of an agent's own task, admitting its group if it is new. ARGV: run_id, nonce, task_id, task.
-- The group is in no queue and its slots are not among the open ones that others lease. Answers as lease_task.lua.
local tasks, groups = KEYS[3], KEYS[8]
local run_id, nonce, task_id, task = unpack(ARGV)
local run = read_run()
if not run then return {'error', 'UNKNOWN_RUN', run_id} end
local held = held_lease(run, nonce)
if held then return held end
local known, group = redis.call('HGET', tasks, task_id), redis.call('HGET', groups, task_id)
if known and known ~= task then return {'error', 'OTHER_TASK', task_id} end
if run.ended then return {'ok', RUN_ENDED} end
if known and not group then
  return {'error', 'FULL_GROUP', task_id, 'it is trained, or was discarded'}
end
if not known then
  local reason = closed_by(run)
  if reason then return {'ok', reason} end
  redis.call('HSET', tasks, task_id, task)
  group = admitted_group(run, task_id, '1', cjson.decode(task).num_samples, {})
  group.own = true
  return lease_slot(run, task_id, 1, group, nonce)
end
group = cjson.decode(group)
for slot, state in ipairs(group.slots) do
  if state.state == 'open' then return lease_slot(run, task_id, slot, group, nonce) end
end
return {'error', 'FULL_GROUP', task_id, 'all its rollouts are leased or finished'}
