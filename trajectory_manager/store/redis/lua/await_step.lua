-- The trainer waits for a step, which starts from these weights. ARGV: run_id, epoch, step, base_version.
local config, counters = KEYS[1], KEYS[2]
local run_id, epoch, step, base = unpack(ARGV)
if redis.call('EXISTS', config) == 0 then return {'refused', 'UNKNOWN_RUN', run_id} end
local known = redis.call('HMGET', counters, 'epoch', 'leased', 'training', 'next_base')
local current = known[1] or '0'
if current ~= epoch then return {'refused', 'STALE_TRAINER', run_id, epoch, current} end
if tonumber(step) <= tonumber(known[2] or '0') then return {'ok'} end
-- From now on this trainer is counted on to tell.
redis.call('HSET', counters, 'tells', epoch)
if known[3] == '1' or (known[4] or '0') ~= base then
  redis.call('HSET', counters, 'training', 0, 'next_base', base)
  redis.call('HINCRBY', counters, 'version:tasks', 1)
end
return {'ok'}
