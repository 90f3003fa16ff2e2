-- pulse: note on this node what is known of the others, and tell what it knows.
--
-- KEYS  1 node, 2 high: as in mint.lua. Of each other place i the node keeps `changes:<i>`, the greatest number of changes that
--       anybody knows the node there to have made, and `floor:<i>`, the least floor that a node must have to vote there
-- ARGV  1 admission id
--       2 and on: for each place of the cluster, by index, the changes that the server knows of; 0 for none
-- Returns  {'pulse', clock_us, changes, high, {changes of each place}, {floor of each place}}   0 where nothing is known
--          {'not_admitted'}  as in mint.lua
--
-- Atomic because a rejoin must not read `high` from a node that has forgotten it in the meantime.
local high = tonumber(redis.call('GET', KEYS[2]) or nil)
if redis.call('HGET', KEYS[1], 'admission') ~= ARGV[1] or not high then
  return {'not_admitted'}
end

local changes, floors = {}, {}
for place = 0, #ARGV - 2 do
  local known = redis.call('HMGET', KEYS[1], 'changes:' .. place, 'floor:' .. place)
  local told = ARGV[place + 2]
  changes[#changes + 1] = math.max(tonumber(known[1] or 0), tonumber(told))
  floors[#floors + 1] = tonumber(known[2] or 0)
  if tonumber(told) > tonumber(known[1] or 0) then
    -- A node without memory left must still be able to tell what it knows.
    redis.pcall('HSET', KEYS[1], 'changes:' .. place, told)
  end
end
local clock = redis.call('TIME')
local own_changes = tonumber(redis.call('HGET', KEYS[1], 'changes') or 0)
return {'pulse', clock[1] * 1000000 + clock[2], own_changes, high, changes, floors}
