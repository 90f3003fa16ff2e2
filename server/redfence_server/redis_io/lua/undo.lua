-- undo: end the hold that a failed attempt made on this node, and notify the servers that wait for its end.
--
-- KEYS  1 node, 2 lock: as in mint.lua
-- ARGV  1 admission id
--       2 nonce: the id of the attempt
-- Returns  {'undone'}        only this attempt had the hold, and it has ended
--          {'kept'}          there is no such hold, or a retry of the same lease shares it
--          {'not_admitted'}  as in mint.lua
-- Publishes  as release.lua
--
-- Atomic because the hold must not change owner between the check and the deletion. The nonce decides, not
-- the lease: deleting by lease would end a grant that another server made to a retry of the same Acquire.
if redis.call('HGET', KEYS[1], 'admission') ~= ARGV[1] then
  return {'not_admitted'}
end

-- include hold.lua
local _, token, shared, _, nonce, notify = read_hold(KEYS[2])
if nonce ~= ARGV[2] or shared == '1' then
  return {'kept'}
end
redis.call('DEL', KEYS[2])
for channel in string.gmatch(notify, '%S+') do
  redis.pcall('PUBLISH', channel, token .. ' ' .. KEYS[2])
end
return {'undone'}
