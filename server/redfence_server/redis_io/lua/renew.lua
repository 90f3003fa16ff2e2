-- renew: start the ttl of a lease anew on this node, if it still holds the lock here.
--
-- KEYS  1 node, 2 lock: as in mint.lua
-- ARGV  1 admission id
--       2 digest of the lease id
-- Returns  {'renewed', token, ttl_ms}
--          {'not_held'}      the lease does not hold the lock here; nothing was changed
--          {'not_admitted'}  as in mint.lua
--
-- Atomic because a key that expires between the look and the PEXPIRE might be somebody else's by then. A lost hold is
-- never created again: it could stand beside another's.
local node = redis.call('HMGET', KEYS[1], 'admission', 'waited_floor')
if node[1] ~= ARGV[1] then
  return {'not_admitted'}
end

-- One from before a wait has ended, as for mint.lua.
local hold = redis.call('HMGET', KEYS[2], 'digest', 'token', 'ttl_ms')
if hold[1] ~= ARGV[2] or tonumber(hold[2]) <= tonumber(node[2] or 0) then
  return {'not_held'}
end
redis.call('PEXPIRE', KEYS[2], hold[3])
return {'renewed', tonumber(hold[2]), tonumber(hold[3])}
