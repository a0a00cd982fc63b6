-- requires: _steps
-- The trainer waits for a step, which starts from these weights. ARGV: run_id, epoch, step, base_version.
local config, counters = KEYS[1], KEYS[2]
local run_id, epoch, step, base = unpack(ARGV)
if redis.call('EXISTS', config) == 0 then return {'error', 'UNKNOWN_RUN', run_id} end
local known = redis.call('HMGET', counters, 'epoch', 'leased_step')
local current = known[1] or '0'
if current ~= epoch then return {'error', 'STALE_TRAINER', run_id, epoch, current} end
if tonumber(step) <= tonumber(known[2] or '0') then return {'ok'} end
-- From now on admission relies on this trainer to report when it waits.
redis.call('HSET', counters, 'reporting_epoch', epoch)
record_awaited_step(counters, base)
return {'ok'}
