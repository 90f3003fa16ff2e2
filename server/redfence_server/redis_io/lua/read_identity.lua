-- read_identity: return this node's identity, its greatest token and its clock. Changes nothing.
--
-- KEYS  1 node, 2 high: as in mint.lua
-- ARGV  none: a server reads the identity before the node has admitted it
-- Returns  {'found', {field, value, ...}, keys, clock_us, high}
--                       the identity, empty if the node has none; the number of keys; the node's clock in
--                       microseconds; the greatest token, left out if the node has none
--
-- Atomic because an identity and a `high` from two moments describe a node that never existed: a node whose
-- vote was just restored would seem to have lost its tokens.
local high = redis.call('GET', KEYS[2])
local clock = redis.call('TIME')
local clock_us = clock[1] * 1000000 + clock[2]
return {'found', redis.call('HGETALL', KEYS[1]), redis.call('DBSIZE'), clock_us, high or nil}
