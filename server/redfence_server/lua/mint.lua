-- mint: grant this lease the lock on this node if it is free, with the next token of the resource.
--
-- KEYS  1 node     hash    this node's identity
--       2 high     string  greatest number this node ever minted or learnt, for any resource
--       3 lock     hash    the hold of the resource: digest, nonce, shared, token, holder, ttl_ms;
--                          expires with the lease
--       4 counter  string  last number minted or learnt for the resource; expires when idle
-- ARGV  1 admission id under which the server was admitted
--       2 digest of the lease id
--       3 nonce: the id of this attempt
--       4 holder label
--       5 ttl in ms
--       6 how long an unused counter is kept, in ms
-- Returns  {'granted', nonce, token}                  the lease holds the lock here; the nonce and token of *this hold*
--          {'held', digest, token, holder, pttl_ms}   another lease does
--          {'exhausted'}                              the numbers below 2^53 are used up; nothing changed
--          {'not_admitted'}                           the node is not the one the server was admitted to, or
--                                                     has lost its `high`; nothing changed
--
-- Atomic because the number must grow in the same step that takes the lock: between the two, another attempt
-- could take the lock and a smaller number.
if redis.call('HGET', KEYS[1], 'admission') ~= ARGV[1] or redis.call('EXISTS', KEYS[2]) == 0 then
  return {'not_admitted'}
end

local hold = redis.call('HMGET', KEYS[3], 'digest', 'nonce', 'token', 'holder')
if hold[1] and hold[1] ~= ARGV[2] then
  return {'held', hold[1], tonumber(hold[3]), hold[4], redis.call('PTTL', KEYS[3])}
end

if hold[1] then
  -- A retried Acquire of the lease that holds the lock. The first attempt's undo must no longer delete the hold:
  -- another server may be granting it just now.
  redis.call('HSET', KEYS[3], 'shared', '1', 'ttl_ms', ARGV[5])
  redis.call('PEXPIRE', KEYS[3], ARGV[5])
  return {'granted', hold[2], tonumber(hold[3])}
end

local high = tonumber(redis.call('GET', KEYS[2]))
-- A counter that was dropped as idle starts again at `high`, which is no less than it ever was.
local token = tonumber(redis.call('GET', KEYS[4]) or high) + 1
if token >= 9007199254740992 then
  return {'exhausted'}
end
-- tostring() would print a large number as a float.
local digits = string.format('%.0f', token)
redis.call('SET', KEYS[4], digits, 'PX', ARGV[6])
if token > high then
  redis.call('SET', KEYS[2], digits)
end
redis.call('HSET', KEYS[3], 'digest', ARGV[2], 'nonce', ARGV[3], 'shared', '0', 'token', digits,
  'holder', ARGV[4], 'ttl_ms', ARGV[5])
redis.call('PEXPIRE', KEYS[3], ARGV[5])
return {'granted', ARGV[3], token}
