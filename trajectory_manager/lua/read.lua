-- Reads a rollout as it is at one moment. ARGV: rollout_id, detail, then turn_id... (none: all turns).
-- Answers the header, the kinds of tokens, and for each turn its name, opening and live state, followed by its
-- segments (detail 'tokens', or 'newest' for the last turn only) or by "kind num_tokens" of each segment (detail 'spans') or nothing ('turns').
local header, order, turns, live, kinds, segments = unpack(KEYS)
local rollout_id, detail = ARGV[1], ARGV[2]
local head = redis.call('HGETALL', header)
if #head == 0 then return {'ok', false} end
if redis.call('HEXISTS', header, 'schema') == 0 then return {'refused', 'OLD_SCHEMA'} end
if detail == 'header' then return {'ok', head} end
local names = {unpack(ARGV, 3)}
if #names == 0 then names = redis.call('LRANGE', order, detail == 'newest' and -1 or 0, -1) end
local found = {}
for i, name in ipairs(names) do
  local opening = redis.call('HGET', turns, name)
  if not opening then return {'refused', 'UNKNOWN_TURN', name} end
  local turn = {name, opening, redis.call('HGET', live, name)}
  if detail ~= 'turns' then
    for _, segment in ipairs(redis.call('LRANGE', segments .. name, 0, -1)) do
      if detail == 'spans' then
        segment = struct.unpack('<H', segment) .. ' ' .. (#segment - 2) / 8
      end
      table.insert(turn, segment)
    end
  end
  found[i] = turn
end
return {'ok', head, redis.call('LRANGE', kinds, 0, -1), found}
