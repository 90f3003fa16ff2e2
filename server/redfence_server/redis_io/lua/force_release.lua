-- force_release: end the hold of a lease on this node for an operator, and remember it for the lease's holder.
--
-- KEYS  1 node, 2 lock: as in mint.lua
--       3 forced  string  exists if an operator ended the lease whose digest its name has; expires after the
--                         lease's ttl, when the holder has stopped by itself
-- ARGV  1 admission id
--       2 digest of the lease id
--       3 the token that the operator named
-- Returns  {'released'}      the hold has ended; with a lock delay, the lock stays closed for it from now on
--          {'not_held'}      the lease does not hold the lock here, or with a greater token, or its lock delay
--                            keeps the lock closed already; nothing was changed
--          {'not_admitted'}  as in mint.lua
-- Publishes  as release.lua; for a lock that stays closed '0 KEY', because it opens earlier than waiters expect
--
-- A lease may get the lock again with a greater token, if its holder retries the Acquire. This script may
-- arrive late, and must not end that grant. A smaller token belongs to the same lease: no commit reached it.
--
-- Atomic because the hold must not change owner between the check and the deletion.
if redis.call('HGET', KEYS[1], 'admission') ~= ARGV[1] then
  return {'not_admitted'}
end

-- include hold.lua
local digest, token, _, ttl_ms, _, notify, tail = read_hold(KEYS[2])
if digest ~= ARGV[2] or tonumber(token) > tonumber(ARGV[3]) then
  return {'not_held'}
end
local _, _, delay_ms, is_closed = read_tail(KEYS[2], tail)
if is_closed then
  return {'not_held'}
end
if delay_ms > 0 then
  redis.call('PEXPIRE', KEYS[2], delay_ms)
  token = '0'
else
  redis.call('DEL', KEYS[2])
end
-- Without memory for the mark, the hold still ends; its holder then hears that the lease is not held.
redis.pcall('SET', KEYS[3], ARGV[3], 'PX', ttl_ms)
for channel in string.gmatch(notify, '%S+') do
  redis.pcall('PUBLISH', channel, token .. ' ' .. KEYS[2])
end
return {'released'}
