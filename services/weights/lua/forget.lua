-- Drops all versions older than the newest ARGV[1] committed ones; returns the oldest one kept.
-- KEYS: publishes, allocations, manifests. ARGV: keep.

local committed = {}
for _, version in ipairs(redis.call("HKEYS", KEYS[3])) do
  committed[#committed + 1] = tonumber(version)
end
if #committed == 0 then return 0 end
table.sort(committed)
local oldest = committed[math.max(1, #committed - tonumber(ARGV[1]) + 1)]

for _, version in ipairs(redis.call("HKEYS", KEYS[2])) do
  if tonumber(version) < oldest then
    redis.call("HDEL", KEYS[2], version)
    redis.call("HDEL", KEYS[3], version)
  end
end
local publishes = redis.call("HGETALL", KEYS[1])
for i = 1, #publishes, 2 do
  if tonumber(publishes[i + 1]) < oldest then redis.call("HDEL", KEYS[1], publishes[i]) end
end
return oldest
