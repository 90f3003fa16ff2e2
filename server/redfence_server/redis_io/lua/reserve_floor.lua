-- reserve_floor: note on a node without a vote the floor that it will get, before its peers note it.
--
-- KEYS  1 node: as in mint.lua
-- ARGV  1 id of the quarantine
--       2 the floor
-- Returns  {'reserved'}
--          {'changed'}   the node has left that quarantine, or has reserved as much; nothing was changed
--
-- Field `reserved` belongs to the present quarantine: quarantine.lua removes it. Peers note a floor for this
-- index only after its reservation here. So the driver after a dead one starts above that floor, and this
-- node never looks like one that was replaced.
--
-- Atomic because only the driver with the greater floor may go on, if there are two.
local identity = redis.call('HMGET', KEYS[1], 'admission', 'state', 'floor')
-- Negated comparison, so that NaN is rejected too.
local is_greater = tonumber(ARGV[2]) > tonumber(identity[3] or 0)
if identity[1] ~= ARGV[1] or identity[2] == 'ready' or not is_greater then
  return {'changed'}
end
redis.call('HSET', KEYS[1], 'floor', ARGV[2], 'reserved', ARGV[2])
return {'reserved'}
