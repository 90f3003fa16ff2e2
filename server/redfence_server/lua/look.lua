-- look: tell who the node is and what it remembers, in one look. Changes nothing.
--
-- KEYS  1 node, 2 high: as in mint.lua
-- ARGV  none: it is for servers that are not admitted yet
-- Returns  {'found', {field, value, ...}, keys, high}    the identity, empty if there is none; how many keys there are; `high`,
--                                                      left out if there is none
--
-- Atomic because an identity beside the `high` of a moment before or after is a node that never was: one that has just come back would
-- seem to have lost its numbers.
local high = redis.call('GET', KEYS[2])
return {'found', redis.call('HGETALL', KEYS[1]), redis.call('DBSIZE'), high or nil}
