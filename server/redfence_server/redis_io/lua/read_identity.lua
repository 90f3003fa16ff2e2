-- read_identity: return this node's identity, its greatest token, its clock, and whether it would run a mint.
-- Changes nothing.
--
-- KEYS  1 node, 2 high: as in mint.lua
-- ARGV  none: a server reads the identity before the node has admitted it
-- Returns  {'found', {field, value, ...}, keys, clock_us, refusal, high}
--                       the identity, empty if the node has none; the number of keys; the node's clock in
--                       microseconds; the error with which the node refuses a command of a mint (memory or
--                       disk full, rights), with the name of that command, or ''; the greatest token, left
--                       out if the node has none
--
-- Atomic because an identity and a `high` from two moments describe a node that never existed: a node whose
-- vote was just restored would seem to have lost its tokens.
local high = redis.call('GET', KEYS[2])
local clock = redis.call('TIME')
local clock_us = clock[1] * 1000000 + clock[2]
local refusal = ''
if high then
  -- The node judges a write before it runs it. With NX, a write to a key that exists changes nothing, so the
  -- node writes nothing to its disk.
  for _, command in ipairs({{'SET', KEYS[2], high, 'NX'}, {'MGET', KEYS[2]}, {'HMGET', KEYS[1], 'floor'}}) do
    local answer = redis.pcall(unpack(command))
    if type(answer) == 'table' and answer.err and refusal == '' then
      refusal = answer.err .. ' (' .. command[1] .. ')'
    end
  end
end
return {'found', redis.call('HGETALL', KEYS[1]), redis.call('DBSIZE'), clock_us, refusal, high or nil}
