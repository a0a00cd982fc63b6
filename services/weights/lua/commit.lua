-- requires: _below
-- Makes a version visible, once.
-- KEYS: counters, allocations, manifests. ARGV: epoch, version, manifest.
-- Returns {"ok", committed manifest}, {"stale", current epoch} or {"missing"}.

local current = redis.call("HGET", KEYS[1], "epoch") or "0"
if below(ARGV[1], current) then return {"stale", current} end
redis.call("HSET", KEYS[1], "epoch", ARGV[1])

if redis.call("HEXISTS", KEYS[2], ARGV[2]) == 0 then return {"missing"} end
local stands = redis.call("HGET", KEYS[3], ARGV[2])
if stands then return {"ok", stands} end

redis.call("HSET", KEYS[3], ARGV[2], ARGV[3])
local newest = tonumber(redis.call("HGET", KEYS[1], "newest") or "0")
if tonumber(ARGV[2]) > newest then redis.call("HSET", KEYS[1], "newest", ARGV[2]) end
return {"ok", ARGV[3]}
