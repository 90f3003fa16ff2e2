-- raise_floor: note on this node the least floor that a process at another node index needs to vote. It is the fence.
--
-- KEYS  1 node, 2 high: as in mint.lua
-- ARGV  1 admission id, or the id of the quarantine of a node without a vote
--       2 admission id to take from now on: random
--       3 the other node's index
--       4 the floor, greater than every token on this node
--       5 id of the other process's quarantine: the fence is for that process and for no other one at its index
-- Returns  {'raised'}
--          {'greater', high}  this node has a token that is not below the floor; nothing was changed
--          {'not_admitted'}   as in mint.lua
--
-- A node that votes takes the new admission id. So every server must look at it again before its next command, reads
-- `floor:<index>`, and drops a process of a lower floor at that index. A commit of an attempt that began before is refused.
-- A node without a vote keeps its id: no server is admitted to it, and every server looks at it again when it votes.
-- `high` takes the floor, so that the floor is found on every quorum if this node's peers are lost next.
--
-- `fence:<index>` tells for which quarantine the floor was raised: two processes may reserve one floor, for their drivers
-- may have read the same tokens.
--
-- Atomic because a token minted here between the check and the note could be granted beside an equal token of that node.
local identity = redis.call('HMGET', KEYS[1], 'admission', 'state')
local high = tonumber(redis.call('GET', KEYS[2]) or nil)
-- A node that forgot may have lost `high` with the rest. It counts for nothing while it has no vote.
local has_forgotten = identity[2] ~= 'ready' and not high
if identity[1] ~= ARGV[1] or not (has_forgotten or (high and high >= 0)) then
  return {'not_admitted'}
end
-- Negated comparison, so that NaN is rejected too.
if not ((high or 0) < tonumber(ARGV[4])) then
  return {'greater', high}
end
redis.call('SET', KEYS[2], ARGV[4])
redis.call('HSET', KEYS[1], 'floor:' .. ARGV[3], ARGV[4], 'fence:' .. ARGV[3], ARGV[5])
if identity[2] == 'ready' then
  redis.call('HSET', KEYS[1], 'admission', ARGV[2])
end
return {'raised'}
