-- renew: restart the ttl of a lease on this node, if it still holds the lock here.
--
-- KEYS  1 node, 2 lock: as in mint.lua
--       3 forced: as in force_release.lua
-- ARGV  1 admission id
--       2 digest of the lease id
-- Returns  {'renewed', token, ttl_ms}
--          {'not_held'}      the lease does not hold the lock here, or its lock delay keeps the lock closed;
--                            nothing was changed
--          {'forced'}        nor does it, because an operator ended it; nothing was changed
--          {'not_admitted'}  as in mint.lua
--
-- Atomic because another lease may own the key if it expires between the check and the PEXPIRE. A lost hold
-- is never created again, because another lease may have got the lock on other nodes.
local node = redis.call('HMGET', KEYS[1], 'admission', 'waited_floor')
if node[1] ~= ARGV[1] then
  return {'not_admitted'}
end

local text = redis.pcall('GET', KEYS[2])
local token, ttl_ms, delay_ms
if type(text) == 'table' then
  -- include hold.lua
  local hold = {read_hold(KEYS[2])}
  if hold[1] == ARGV[2] then
    token, ttl_ms = hold[2], hold[4]
  end
elseif text and string.find(text, ARGV[2] .. ' ', 1, true) == 1 then
  token, ttl_ms, delay_ms = string.match(text, '^(%d+) [01] (%d+) [^\n]*\n[^\n]*\n?(%d*)', #ARGV[2] + 2)
end
local life_ms = ttl_ms
if delay_ms and delay_ms ~= '' then
  life_ms = ttl_ms + delay_ms
  if redis.call('PTTL', KEYS[2]) <= tonumber(delay_ms) then
    token = nil
  end
end
-- A hold from before a wait has ended, as in mint.lua.
if not token or tonumber(token) <= tonumber(node[2] or 0) then
  if redis.call('GET', KEYS[3]) then
    return {'forced'}
  end
  return {'not_held'}
end
redis.call('PEXPIRE', KEYS[2], life_ms)
return {'renewed', tonumber(token), tonumber(ttl_ms)}
