-- look: tell who the node is and what it remembers, in one look. Changes nothing.
--
-- KEYS  1 node, 2 high: as in mint.lua
-- Returns  {{field, value, ...}, keys}         the identity, empty if there is none; how many keys there are; no `high`
--          {{field, value, ...}, keys, high}
--
-- Atomic because an identity beside the `high` of a moment before or after is a node that never was: one that has just come back would
-- seem to have lost its numbers.
local high = redis.call('GET', KEYS[2])
local identity = redis.call('HGETALL', KEYS[1])
if not high then
  return {identity, redis.call('DBSIZE')}
end
return {identity, redis.call('DBSIZE'), high}
