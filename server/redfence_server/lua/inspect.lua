-- inspect: tell who holds the lock on this node. Changes nothing.
--
-- KEYS  1 node, 2 lock: as in mint.lua
-- ARGV  1 admission id
-- Returns  {'held', digest, token, holder, pttl_ms}
--          {'free'}
--          {'not_admitted'}  as in mint.lua
--
-- Atomic because the answer must not mix two holds.
if redis.call('HGET', KEYS[1], 'admission') ~= ARGV[1] then
  return {'not_admitted'}
end

local hold = redis.call('HMGET', KEYS[2], 'digest', 'token', 'holder')
if not hold[1] then
  return {'free'}
end
return {'held', hold[1], tonumber(hold[2]), hold[3], redis.call('PTTL', KEYS[2])}
