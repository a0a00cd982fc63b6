-- The members whose membership has not expired. KEYS: members.

local time = redis.call("TIME")
local now = time[1] * 1000 + math.floor(time[2] / 1000)
return redis.call("ZRANGEBYSCORE", KEYS[1], "(" .. string.format("%d", now), "+inf")
