-- requires: _below
-- Allocates a version, or returns the one already allocated to the key.
-- KEYS: counters, publishes, allocations. ARGV: epoch, key, "step:parent", floor.
-- Returns {"ok", version}, {"stale", current epoch} or {"conflict"}.

local current = redis.call("HGET", KEYS[1], "epoch") or "0"
if below(ARGV[1], current) then return {"stale", current} end
redis.call("HSET", KEYS[1], "epoch", ARGV[1])

local known = redis.call("HGET", KEYS[2], ARGV[2])
if known then
  if redis.call("HGET", KEYS[3], known) ~= ARGV[3] then return {"conflict"} end
  return {"ok", known}
end

local allocated = tonumber(redis.call("HGET", KEYS[1], "allocated") or "0")
local version = string.format("%d", math.max(allocated, tonumber(ARGV[4])) + 1)
redis.call("HSET", KEYS[1], "allocated", version)
redis.call("HSET", KEYS[2], ARGV[2], version)
redis.call("HSET", KEYS[3], version, ARGV[3])
return {"ok", version}
