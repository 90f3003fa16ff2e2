-- raise_floor: note on this node the least floor with which a process at another index may vote: the fence.
--
-- KEYS  1 node, 2 high: as in mint.lua
-- ARGV  1 admission id, or the id of the quarantine of a node without a vote
--       2 admission id to take from now on: random
--       3 the other node's index
--       4 the floor, greater than every token on this node
--       5 id of the other process's quarantine: the fence is only for that process at its index
-- Returns  {'raised'}
--          {'greater', high}  this node has a token that is not below the floor; nothing was changed
--          {'not_admitted'}   as in mint.lua
--
-- A node that votes takes the new admission id. So every server must examine it again before its next
-- command, reads `floor:<index>`, and drops a process with a lower floor at that index. A commit of an
-- earlier attempt is refused. A node without a vote keeps its id: no server is admitted to it, and each
-- examines it again when it votes. `high` takes the floor, so that every quorum shows the floor if this
-- node's peers are lost next.
--
-- `fence:<index>` names the quarantine for which the floor was raised. Two processes may reserve one floor,
-- because their drivers may have read the same tokens.
--
-- Atomic because a token minted here between check and note could equal a token granted through that node.
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
