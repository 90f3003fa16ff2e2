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
local found = redis.call('MGET', KEYS[2], KEYS[4])
local high = tonumber(found[1] or nil)
if redis.call('HGET', KEYS[1], 'admission') ~= ARGV[1] or not (high and high >= 0) then
  return {'not_admitted'}
end

-- include hold.lua
local digest, stored, shared, ttl_ms, nonce, notify, tail = read_hold(KEYS[3])
if digest ~= ARGV[2] or nonce ~= ARGV[3] then
  return {'lost'}
end

local token = tonumber(ARGV[4])
if tonumber(stored) < token then
  local fields = table.concat({digest, ARGV[4], shared, ttl_ms, nonce}, ' ')
  redis.call('SET', KEYS[3], fields .. notify .. '\n' .. tail, 'KEEPTTL')
end
if tonumber(found[2] or high) < token then
  redis.call('SET', KEYS[4], ARGV[4], 'PX', ARGV[5])
end
if high < token then
  redis.call('SET', KEYS[2], ARGV[4])
end
return {'committed'}
