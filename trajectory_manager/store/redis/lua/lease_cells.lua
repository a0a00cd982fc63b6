-- Leases the oldest queued cells of a column whose samples have the columns it needs.
-- ARGV: run_id, column, max_samples, nonce, required column... Returns the epoch, its seconds and the samples; for the
-- nonce of a lease that is held, those of it that are not written.
-- A cell is "number" when queued, "number epoch" when leased, "=epoch" when written.
local config, counters, groups, cells, queue, leases, requests =
  KEYS[1], KEYS[2], KEYS[8], KEYS[19], KEYS[20], KEYS[21], KEYS[25]
local column, max_samples, nonce, page_size = ARGV[2], tonumber(ARGV[3]), ARGV[4], 512
local rules = redis.call('GET', config)
if not rules then return {'error', 'UNKNOWN_RUN', ARGV[1]} end
local time = redis.call('TIME')
local now = time[1] * 1000 + time[2] / 1000
local expiry = string.format('%.3f', now)
for _, cell in ipairs(redis.call('ZRANGEBYSCORE', leases, '-inf', expiry)) do
  local number = string.match(redis.call('HGET', cells, cell) or '', '^%d+')
  if number then
    redis.call('HSET', cells, cell, number)
    redis.call('ZADD', queue, 0, (string.gsub(cell, ' ', ' ' .. number .. ' ')))
  end
end
redis.call('ZREMRANGEBYSCORE', leases, '-inf', expiry)
redis.call('ZREMRANGEBYSCORE', requests, '-inf', expiry)

-- The leased cells of the column under an epoch, oldest first.
local function held_samples(epoch)
  local found, samples = {}, {}
  for _, field in ipairs(redis.call('ZRANGE', leases, 0, -1)) do
    local name, sample = string.match(field, '^(%S+) (.+)$')
    local number, holder = string.match(redis.call('HGET', cells, field), '^(%d+) (%d+)$')
    if name == column and holder == epoch then table.insert(found, number .. ' ' .. sample) end
  end
  table.sort(found)
  for i, cell in ipairs(found) do samples[i] = string.match(cell, ' (.+)$') end
  return samples
end

local live = redis.call('ZRANGE', requests, 0, -1, 'WITHSCORES')
for i = 1, #live, 2 do
  local known, epoch = string.match(live[i], '^(%S+) (%d+)$')
  local samples = known == nonce and held_samples(epoch) or {}
  if #samples > 0 then return {'ok', epoch, string.format('%.3f', (live[i + 1] - now) / 1000), samples} end
end

local function has_needed_columns(sample)
  for i = 5, #ARGV do
    local cell = redis.call('HGET', cells, ARGV[i] .. ' ' .. sample)
    if not cell or string.sub(cell, 1, 1) ~= '=' then return false end
  end
  return true
end

-- Whether a queued name is that of a cell. A manager of release 0.2 queues the cells of a group again when it completes
-- it, and leaves those of a group that it discards.
local function is_cell(number, sample)
  local task_id = string.match(sample, '^(.+)/%d+/%d+#')
  if redis.call('HEXISTS', groups, task_id) == 0 then
    redis.call('HDEL', cells, column .. ' ' .. sample, task_id)
    return false
  end
  return redis.call('HGET', cells, column .. ' ' .. sample) == number
end

local found, start, page = {}, '[' .. column .. ' ', nil
repeat
  page = redis.call('ZRANGEBYLEX', queue, start, '(' .. column .. '!', 'LIMIT', 0, page_size)
  for _, name in ipairs(page) do
    local number, sample = string.match(name, ' (%d+) (.+)$')
    if #found == max_samples then break end
    if not is_cell(number, sample) then
      redis.call('ZREM', queue, name)
    elseif has_needed_columns(sample) then
      table.insert(found, {name = name, number = number, sample = sample})
    end
  end
  start = '(' .. (page[#page] or '')
until #page < page_size or #found == max_samples
if #found == 0 then return {'ok'} end

-- At least the time in ms: an epoch that a failover lost is never given out again.
local epoch = math.max(tonumber(redis.call('HGET', counters, 'column_epoch') or 0) + 1, math.floor(now))
epoch = string.format('%d', epoch)
redis.call('HSET', counters, 'column_epoch', epoch)
local seconds, samples = cjson.decode(rules).lease_seconds, {}
redis.call('ZADD', requests, string.format('%.3f', now + seconds * 1000), nonce .. ' ' .. epoch)
for i, cell in ipairs(found) do
  local field = column .. ' ' .. cell.sample
  redis.call('ZREM', queue, cell.name)
  redis.call('HSET', cells, field, cell.number .. ' ' .. epoch)
  redis.call('ZADD', leases, string.format('%.3f', now + seconds * 1000), field)
  samples[i] = cell.sample
end
return {'ok', epoch, tostring(seconds), samples}
