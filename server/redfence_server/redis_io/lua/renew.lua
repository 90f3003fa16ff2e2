-- renew: restart the ttl of a lease on this node, if it still holds the lock here.
--
-- KEYS  1 node, 2 lock: as in mint.lua
-- ARGV  1 admission id
--       2 digest of the lease id
-- Returns  {'renewed', token, ttl_ms}
--          {'not_held'}      the lease does not hold the lock here; nothing was changed
--          {'not_admitted'}  as in mint.lua
--
-- Atomic because another lease may own the key if it expires between the check and the PEXPIRE. A lost hold
-- is never created again, because another lease may have got the lock on other nodes.
local node = redis.call('HMGET', KEYS[1], 'admission', 'waited_floor')
if node[1] ~= ARGV[1] then
  return {'not_admitted'}
end

-- A hold from before a wait has ended, as in mint.lua.
local hold = redis.call('HMGET', KEYS[2], 'digest', 'token', 'ttl_ms')
if hold[1] ~= ARGV[2] or tonumber(hold[2]) <= tonumber(node[2] or 0) then
  return {'not_held'}
end
redis.call('PEXPIRE', KEYS[2], hold[3])
return {'renewed', tonumber(hold[2]), tonumber(hold[3])}
