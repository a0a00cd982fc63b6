-- Adds a member, or extends it, for ARGV[2] milliseconds; at most ARGV[3] members (0: any).
-- KEYS: members. ARGV: member, milliseconds, limit. Returns 1 if it is a member now, else 0.

local time = redis.call("TIME")
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call("ZREMRANGEBYSCORE", KEYS[1], "-inf", now)

local limit = tonumber(ARGV[3])
local known = redis.call("ZSCORE", KEYS[1], ARGV[1])
if not known and limit > 0 and redis.call("ZCARD", KEYS[1]) >= limit then return 0 end
redis.call("ZADD", KEYS[1], string.format("%d", now + ARGV[2]), ARGV[1])
return 1
