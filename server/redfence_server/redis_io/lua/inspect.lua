-- inspect: return the hold of the lock on this node. Changes nothing.
--
-- KEYS  1 node, 2 lock: as in mint.lua
-- ARGV  1 admission id
-- Returns  {'held', digest, token, holder, pttl_ms[, lock_delay_ms]}   as in mint.lua
--          {'free'}
--          {'not_admitted'}  as in mint.lua
--
-- Atomic because the answer must not mix two holds.
local node = redis.call('HMGET', KEYS[1], 'admission', 'waited_floor')
if node[1] ~= ARGV[1] then
  return {'not_admitted'}
end

-- A hold from before a wait has ended, as in mint.lua.
-- include hold.lua
local digest, token, _, _, _, _, tail = read_hold(KEYS[2])
if not token or tonumber(token) <= tonumber(node[2] or 0) then
  return {'free'}
end
local holder, left_ms, delay_ms = read_tail(KEYS[2], tail)
return {'held', digest, tonumber(token), holder, left_ms, delay_ms > 0 and delay_ms or nil}
