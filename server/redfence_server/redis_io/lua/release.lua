-- release: end the hold of a lease on this node, and notify the servers that wait for it.
--
-- KEYS  1 node, 2 lock: as in mint.lua
-- ARGV  1 admission id
--       2 digest of the lease id
-- Returns  {'released'}
--          {'not_held'}      the lease does not hold the lock here. Nothing was changed, but a lock that the
--                            lock delay of this lease kept closed is free now: its holder has stopped
--          {'not_admitted'}  as in mint.lua
-- Publishes  'TOKEN KEY' on each channel of the hold: the token of the hold here, and the lock key
--
-- Atomic because the hold must not change owner between the check and the deletion.
if redis.call('HGET', KEYS[1], 'admission') ~= ARGV[1] then
  return {'not_admitted'}
end

local text = redis.pcall('GET', KEYS[2])
local token, notify, delay_ms
if type(text) == 'table' then
  -- include hold.lua
  local hold = {read_hold(KEYS[2])}
  if hold[1] == ARGV[2] then
    token, notify = hold[2], hold[6]
  end
elseif text and string.find(text, ARGV[2] .. ' ', 1, true) == 1 then
  token, notify, delay_ms = string.match(text, '^(%d+) [01] %d+ %S*([^\n]*)\n[^\n]*\n?(%d*)', #ARGV[2] + 2)
end
if not token then
  return {'not_held'}
end
local is_closed = delay_ms and delay_ms ~= '' and redis.call('PTTL', KEYS[2]) <= tonumber(delay_ms)
redis.call('DEL', KEYS[2])
if notify ~= '' then
  for channel in string.gmatch(notify, '%S+') do
    -- A notice is only a hint: without the right to publish, the hold still ends.
    redis.pcall('PUBLISH', channel, token .. ' ' .. KEYS[2])
  end
end
if is_closed then
  return {'not_held'}
end
return {'released'}
