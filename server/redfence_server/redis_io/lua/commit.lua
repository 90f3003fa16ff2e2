-- commit: raise the token of one hold, and the node's counters, to the token of the grant.
--
-- KEYS  1 node, 2 high, 3 lock, 4 counter: as in mint.lua
-- ARGV  1 admission id
--       2 digest of the lease id
--       3 nonce that this node answered to the mint
--       4 token of the grant
--       5 how long an unused counter is kept, in ms
-- Returns  {'committed'}     the minted hold has lasted without a gap, and has the token now
--          {'lost'}          the minted hold has ended; nothing was changed
--          {'not_admitted'}  as in mint.lua
--
-- Atomic because the proof that tokens are ordered needs hold and counter at one instant. The nonce is part
-- of the condition: without it, a late commit of a first attempt could reach a second hold of the same lease.
local high = tonumber(redis.call('GET', KEYS[2]) or nil)
if redis.call('HGET', KEYS[1], 'admission') ~= ARGV[1] or not (high and high >= 0) then
  return {'not_admitted'}
end

local hold = redis.call('HMGET', KEYS[3], 'digest', 'nonce', 'token')
if hold[1] ~= ARGV[2] or hold[2] ~= ARGV[3] then
  return {'lost'}
end

local token = tonumber(ARGV[4])
if tonumber(hold[3]) < token then
  redis.call('HSET', KEYS[3], 'token', ARGV[4])
end
if tonumber(redis.call('GET', KEYS[4]) or high) < token then
  redis.call('SET', KEYS[4], ARGV[4], 'PX', ARGV[5])
end
if high < token then
  redis.call('SET', KEYS[2], ARGV[4])
end
return {'committed'}
