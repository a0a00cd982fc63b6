-- Adds a rollout to the rollouts of its run, after checking its lease.
-- ARGV: run_id, rollout_id, has lease (0/1), nonce. Returns purpose ('' without a lease) and required weight version.
local config, counters, groups, leases, nonces, rollouts =
  KEYS[1], KEYS[2], KEYS[8], KEYS[9], KEYS[10], KEYS[12]
local run_id, rollout_id, has_lease, nonce = unpack(ARGV)
if redis.call('EXISTS', config) == 0 then return {'error', 'UNKNOWN_RUN', run_id} end
local purpose, required_version = '', 0
if has_lease == '1' then
  local time = redis.call('TIME')
  local score = redis.call('ZSCORE', leases, rollout_id)
  local expired = not score or tonumber(score) <= time[1] * 1000 + time[2] / 1000
  if expired or redis.call('HGET', nonces, rollout_id) ~= nonce then
    return {'error', 'LOST_LEASE', rollout_id}
  end
  local group = redis.call('HGET', groups, string.match(rollout_id, '^(.+)/%d+/%d+$'))
  group = cjson.decode(group)
  purpose, required_version = group.purpose, group.required_version or 0
end
if not redis.call('ZSCORE', rollouts, rollout_id) then
  redis.call('ZADD', rollouts, redis.call('HINCRBY', counters, 'registered', 1), rollout_id)
end
return {'ok', purpose, required_version}
