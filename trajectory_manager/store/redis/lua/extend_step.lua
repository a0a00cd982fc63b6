-- Renews the lease of a step. ARGV: run_id, epoch, step. Returns the seconds it lives.
local config, counters, ledger = KEYS[1], KEYS[2], KEYS[14]
local rules = redis.call('GET', config)
if not rules then return {'error', 'UNKNOWN_RUN', ARGV[1]} end
local current = redis.call('HGET', counters, 'epoch') or '0'
if current ~= ARGV[2] then return {'error', 'STALE_TRAINER', ARGV[1], ARGV[2], current} end
if redis.call('HEXISTS', ledger, ARGV[3]) == 0 then return {'error', 'UNKNOWN_STEP', ARGV[3]} end
return {'ok', tostring(cjson.decode(rules).lease_seconds)}
