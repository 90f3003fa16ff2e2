-- release: end the hold of a lease on this node, and notify the servers that wait for its end.
--
-- KEYS  1 node, 2 lock: as in mint.lua
-- ARGV  1 admission id
--       2 digest of the lease id
-- Returns  {'released'}
--          {'not_held'}      the lease does not hold the lock here; nothing was changed
--          {'not_admitted'}  as in mint.lua
-- Publishes  'TOKEN KEY' on each channel in the hold's `notify`: the token of the hold here, and the lock key
--
-- Atomic because the hold must not change owner between the check and the deletion.
if redis.call('HGET', KEYS[1], 'admission') ~= ARGV[1] then
  return {'not_admitted'}
end

local hold = redis.call('HMGET', KEYS[2], 'digest', 'token', 'notify')
if hold[1] ~= ARGV[2] then
  return {'not_held'}
end
redis.call('DEL', KEYS[2])
for channel in string.gmatch(hold[3] or '', '%S+') do
  -- A notice is only a hint: without the right to publish, the hold still ends.
  redis.pcall('PUBLISH', channel, hold[2] .. ' ' .. KEYS[2])
end
return {'released'}
