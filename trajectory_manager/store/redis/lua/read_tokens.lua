-- Reads parts of turns. KEYS: header and chunks. ARGV: rollout_id, then of each part turn_id, and the first and the
-- last but one of its tokens. Returns ids and log-probs of each, as many as are stored.
local header, rollout_id = KEYS[1], ARGV[1]
if redis.call('EXISTS', header) == 0 then return {'error', 'UNKNOWN_ROLLOUT', rollout_id} end
local BATCH = 128

-- In batches of chunks, so that a long turn is not copied whole.
local function stored_tokens(chunks, from, to)
  local ids, logprobs, start, place = {}, {}, 0, 0
  repeat
    local batch = redis.call('LRANGE', chunks, place, place + BATCH - 1)
    for _, chunk in ipairs(batch) do
      local length = #chunk / 8
      local a, b = math.max(from - start, 0), math.min(to - start, length)
      if a < b then
        table.insert(ids, string.sub(chunk, 1 + a * 4, b * 4))
        table.insert(logprobs, string.sub(chunk, 1 + (length + a) * 4, (length + b) * 4))
      end
      start = start + length
    end
    place = place + BATCH
  until #batch < BATCH or start >= to
  return {table.concat(ids), table.concat(logprobs)}
end

local parts = {}
for i = 2, #ARGV, 3 do
  table.insert(parts, stored_tokens(KEYS[2] .. ARGV[i], tonumber(ARGV[i + 1]), tonumber(ARGV[i + 2])))
end
return {'ok', parts}
