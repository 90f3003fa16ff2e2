-- pulse: note on this node what is known of the others, and tell what it knows.
--
-- KEYS  1 node, 2 high: as in mint.lua. Of each other place i the node keeps `changes:<i>`, the greatest number of changes that
--       anybody knows the node there to have made, and `floor:<i>`, the least floor that a node must have to vote there; of itself
--       `distrusted_until`, until when on its own clock its votes for new grants do not count, for that clock was set
-- ARGV  1 admission id
--       2 for how many ms from now they do not count, as far as the server knows
--       3 and on: for each place of the cluster, by index, the changes that the server knows of; 0 for none
-- Returns  {'pulse', clock_us, changes, high, {changes of each place}, {floor of each place}, distrusted_ms}
--                            0 where nothing is known; for how many ms the votes do not count, as far as anybody knows
--          {'not_admitted'}  as in mint.lua, or the node has become a replica
--
-- Atomic because a rejoin must not read `high` from a node that has forgotten it in the meantime.
local high = tonumber(redis.call('GET', KEYS[2]) or nil)
-- A replica answers everything that changes nothing, so that nobody would notice before the next acquire.
local is_replica = not string.find(redis.call('INFO', 'replication'), 'role:master', 1, true)
if redis.call('HGET', KEYS[1], 'admission') ~= ARGV[1] or not (high and high >= 0) or is_replica then
  return {'not_admitted'}
end

local changes, floors = {}, {}
for place = 0, #ARGV - 3 do
  local known = redis.call('HMGET', KEYS[1], 'changes:' .. place, 'floor:' .. place)
  local told = ARGV[place + 3]
  changes[#changes + 1] = math.max(tonumber(known[1] or 0), tonumber(told))
  floors[#floors + 1] = tonumber(known[2] or 0)
  if tonumber(told) > tonumber(known[1] or 0) then
    -- A node without memory left must still be able to tell what it knows.
    redis.pcall('HSET', KEYS[1], 'changes:' .. place, told)
  end
end
local clock = redis.call('TIME')
local clock_us = clock[1] * 1000000 + clock[2]
local clock_ms = math.floor(clock_us / 1000)
local own = redis.call('HMGET', KEYS[1], 'changes', 'distrusted_until', 'max_ttl_ms')
local before_ms = math.max(0, tonumber(own[2] or 0) - clock_ms)
-- More than a step costs means that the clock was set back since: it does not count for longer because of that.
local left_ms = math.max(math.min(before_ms, math.ceil(own[3] * 1.01) + 2), tonumber(ARGV[2]))
if left_ms ~= before_ms then
  redis.pcall('HSET', KEYS[1], 'distrusted_until', string.format('%.0f', clock_ms + left_ms))
end
return {'pulse', clock_us, tonumber(own[1] or 0), high, changes, floors, left_ms}
