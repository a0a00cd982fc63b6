-- requires: _below
-- Checks a trainer's epoch and its version; writes nothing.
-- KEYS: counters, allocations. ARGV: epoch, version.
-- Returns {"ok"}, {"stale", current epoch} or {"missing"}.

local current = redis.call("HGET", KEYS[1], "epoch") or "0"
if below(ARGV[1], current) then return {"stale", current} end
if redis.call("HEXISTS", KEYS[2], ARGV[2]) == 0 then return {"missing"} end
return {"ok"}
