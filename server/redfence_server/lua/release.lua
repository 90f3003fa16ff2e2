-- release: end a lease on this node.
--
-- KEYS  1 node, 2 lock: as in mint.lua
-- ARGV  1 admission id
--       2 digest of the lease id
-- Returns  {'released'}
--          {'not_held'}      the lease does not hold the lock here; nothing was changed
--          {'not_admitted'}  as in mint.lua
--
-- Atomic because the hold must not change owner between the look and the deletion.
if redis.call('HGET', KEYS[1], 'admission') ~= ARGV[1] then
  return {'not_admitted'}
end

if redis.call('HGET', KEYS[2], 'digest') ~= ARGV[2] then
  return {'not_held'}
end
redis.call('DEL', KEYS[2])
return {'released'}
