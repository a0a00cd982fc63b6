-- Adds a member, or extends it, for ARGV[2] milliseconds.
-- KEYS: members. ARGV: member, milliseconds.

local time = redis.call("TIME")
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call("ZREMRANGEBYSCORE", KEYS[1], "-inf", now)
redis.call("ZADD", KEYS[1], string.format("%d", now + ARGV[2]), ARGV[1])
return 1
