-- reserve_floor: note on a node without a vote which floor it will get, before other nodes are told.
--
-- KEYS  1 node: as in mint.lua
-- ARGV  1 id of the quarantine
--       2 the floor
-- Returns  {'reserved'}
--          {'changed'}   the node has left that quarantine, or another driver has reserved as much or more; nothing was
--                        changed
--
-- Field `reserved` belongs to the present quarantine: quarantine.lua removes it. Other nodes learn a floor for this index
-- only after it was reserved here. So a driver that follows a dead one starts above it, and this node is never taken for
-- one that was replaced.
--
-- Atomic because of two drivers only the one with the greater floor may go on.
local identity = redis.call('HMGET', KEYS[1], 'admission', 'state', 'floor')
-- Negated comparison, so that NaN is rejected too.
local is_greater = tonumber(ARGV[2]) > tonumber(identity[3] or 0)
if identity[1] ~= ARGV[1] or identity[2] == 'ready' or not is_greater then
  return {'changed'}
end
redis.call('HSET', KEYS[1], 'floor', ARGV[2], 'reserved', ARGV[2])
return {'reserved'}
