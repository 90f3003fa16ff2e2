-- vouch: on a node that votes, note what another node must have learnt before it may vote again at its place.
--
-- KEYS  1 node, 2 high: as in mint.lua
-- ARGV  1 admission id
--       2 admission id to take from now on: random
--       3 place of the node that is to come back
--       4 the floor it will have: greater than every number on this node
--       5 the changes it will begin with
-- Returns  {'vouched', changes}
--          {'greater', high}  the floor would be too low by now; nothing was changed
--          {'not_admitted'}   as in mint.lua
--
-- `high` is written back before the node votes: if this one's numbers were lost next, the floor would be found on no quorum.
-- The new admission id makes every server look at this node again before its next command, and so read `floor:<place>`: whoever
-- still talks to what was at that place before drops it then. And an attempt that began before cannot end here any more.
--
-- Atomic because a number minted here between the look and the note could be granted beside the same number of the other node.
local high = tonumber(redis.call('GET', KEYS[2]) or nil)
if redis.call('HGET', KEYS[1], 'admission') ~= ARGV[1] or not (high and high >= 0) then
  return {'not_admitted'}
end
-- Said so that what is no number is refused as well.
if not (high < tonumber(ARGV[4])) then
  return {'greater', high}
end
redis.call('SET', KEYS[2], ARGV[4])
redis.call('HSET', KEYS[1], 'admission', ARGV[2], 'floor:' .. ARGV[3], ARGV[4], 'changes:' .. ARGV[3], ARGV[5])
-- What is noted of others is as easily forgotten as a number, so it counts as one.
return {'vouched', redis.call('HINCRBY', KEYS[1], 'changes', 1)}
