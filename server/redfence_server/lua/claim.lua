-- claim: on a node in quarantine, note which floor it is to have, before the others are asked to vouch for it.
--
-- KEYS  1 node: as in mint.lua
-- ARGV  1 id of the quarantine
--       2 floor that the others will be told
--       3 changes that they will be told
-- Returns  {'claimed'}
--          {'changed'}     the node is not in that quarantine any more, or is to have a floor as great already: another server is
--                          at it; nothing was changed
--
-- It counts for nothing as long as the node does not vote. But whoever tries next starts above it: else, where one server died after
-- a few others had vouched, and the next one asked different ones and came to a lesser floor, the node would later be taken for one that was
-- replaced.
--
-- Atomic because of two servers that bring the node back at once, only the one with the greater floor may go on.
local identity = redis.call('HMGET', KEYS[1], 'admission', 'state', 'floor')
-- Said so that what is no number is refused as well.
local is_greater = tonumber(ARGV[2]) > tonumber(identity[3] or 0)
if identity[1] ~= ARGV[1] or identity[2] ~= 'quarantined' or not is_greater then
  return {'changed'}
end
redis.call('HSET', KEYS[1], 'floor', ARGV[2], 'changes', ARGV[3])
return {'claimed'}
