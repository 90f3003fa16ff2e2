-- inspect: return the hold of the lock on this node. Changes nothing.
--
-- KEYS  1 node, 2 lock: as in mint.lua
-- ARGV  1 admission id
-- Returns  {'held', digest, token, holder, pttl_ms}
--          {'free'}
--          {'not_admitted'}  as in mint.lua
--
-- Atomic because the answer must not mix two holds.
local node = redis.call('HMGET', KEYS[1], 'admission', 'waited_floor')
if node[1] ~= ARGV[1] then
  return {'not_admitted'}
end

-- A hold from before a wait has ended, as in mint.lua.
local hold = redis.call('HMGET', KEYS[2], 'digest', 'token', 'holder')
if not hold[1] or tonumber(hold[2]) <= tonumber(node[2] or 0) then
  return {'free'}
end
return {'held', hold[1], tonumber(hold[2]), hold[3], redis.call('PTTL', KEYS[2])}
