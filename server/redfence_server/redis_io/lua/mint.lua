-- mint: give a lease the lock on this node if it is free, with the next token of the resource. A handover
-- first ends another lease that holds the lock, in the same step.
--
-- KEYS  1 node     hash    this node's identity. Read here: `admission`; `floor`, the greatest token that may
--                          have been minted at this index and forgotten; `waited_floor`, the floor of the
--                          last return after a wait, during which every hold up to it has ended
--       2 high     string  greatest token that this node ever minted or learnt, for any resource
--       3 lock     hash    the hold of the resource: digest, nonce, shared, token, holder, ttl_ms, notify;
--                          expires with the lease
--       4 counter  string  last token minted or learnt for the resource; expires when idle
-- ARGV  1 admission id under which the server was admitted
--       2 digest of the lease id
--       3 nonce: the id of this attempt
--       4 holder label
--       5 ttl in ms
--       6 how long an unused counter is kept, in ms
--       7 digest of the lease to release first, or ''
--       8 channel of this server
--       9 '1' for a notice on that channel when the hold that refuses this mint ends, else '0'
--      10 '1' for a notice when the hold that this mint makes ends, else '0'
-- Returns  {'granted', nonce, token, others, released, clock_us}
--                     the lease holds the lock here; nonce and token of *this hold*; how many other servers
--                     want a notice of its end; 1 if a lease was released first, else 0; the node's clock,
--                     because the vote of a node whose clock was set does not count
--          {'held', digest, token, holder, pttl_ms}   another lease holds the lock; nothing was released
--          {'exhausted'}      no token below 2^53 is left; nothing was changed
--          {'not_admitted'}   the node has another admission id, or has lost its `high`; nothing was changed
-- Publishes  as release.lua, if after a handover the lock is held for a shorter time
--
-- `notify` lists the channels for notices of the hold's end, separated by spaces. It ends with the hold: a
-- waiting server adds itself to the next hold when its mint is refused. A handover passes the list on.
--
-- Atomic because the counter must grow in the step that takes the lock. In between, another attempt could
-- take the lock and a smaller token.
local node = redis.call('HMGET', KEYS[1], 'admission', 'floor', 'waited_floor')
local high = tonumber(redis.call('GET', KEYS[2]) or nil)
if node[1] ~= ARGV[1] or not (high and high >= 0) then
  return {'not_admitted'}
end

local function granted(nonce, token, others, released)
  local clock = redis.call('TIME')
  return {'granted', nonce, token, others, released, clock[1] * 1000000 + clock[2]}
end

local function split(channels, left_out)
  local list = {}
  for channel in string.gmatch(channels, '%S+') do
    if channel ~= left_out then
      list[#list + 1] = channel
    end
  end
  return list
end

local floor = tonumber(node[2] or 0)
local hold = redis.call('HMGET', KEYS[3], 'digest', 'nonce', 'token', 'holder', 'notify')
if hold[1] and tonumber(hold[3]) <= tonumber(node[3] or 0) then
  -- The wait outlasted every hold; this one is left because a clock went back.
  hold = {}
end
-- A process that restarted with proof keeps its holds. But if it is a copy of an older process, greater
-- tokens were granted since. So a retry of the lease gets a new token.
local is_older = hold[1] == ARGV[2] and tonumber(hold[3]) <= floor
local notify = hold[5] or ''
local handed_over = hold[1] and hold[1] == ARGV[7]

if hold[1] and not handed_over and hold[1] ~= ARGV[2] then
  -- After 64 servers, further ones wait for the expiry. A substring is a channel: all have the same length.
  if ARGV[9] == '1' and not string.find(notify, ARGV[8], 1, true) and #split(notify, ARGV[8]) < 64 then
    redis.call('HSET', KEYS[3], 'notify', notify == '' and ARGV[8] or notify .. ' ' .. ARGV[8])
  end
  return {'held', hold[1], tonumber(hold[3]), hold[4], redis.call('PTTL', KEYS[3])}
end

if hold[1] and not handed_over and not is_older then
  -- A retried Acquire of the lease that holds the lock. The undo of the first attempt must no longer delete
  -- the hold, because another server may be granting it now.
  local waiting = split(notify, ARGV[8])
  local other_count = #waiting
  if ARGV[10] == '1' then
    waiting[#waiting + 1] = ARGV[8]
    notify = table.concat(waiting, ' ')
  end
  redis.call('HSET', KEYS[3], 'shared', '1', 'ttl_ms', ARGV[5], 'notify', notify)
  redis.call('PEXPIRE', KEYS[3], ARGV[5])
  return granted(hold[2], tonumber(hold[3]), other_count, 0)
end

-- A counter that was dropped as idle starts again at `high`, which is never smaller. A counter from before
-- the node forgot other keys may be too low; the floor is not.
local counter = tonumber(redis.call('GET', KEYS[4]) or high)
local token = math.max(counter, floor) + 1
-- Negated comparison, so that NaN is rejected too.
if not (token < 9007199254740992) then
  return {'exhausted'}
end
-- tostring() would print a large number as a float.
local digits = string.format('%.0f', token)
redis.call('SET', KEYS[4], digits, 'PX', ARGV[6])
if token > high then
  redis.call('SET', KEYS[2], digits)
end

local waiting = split(notify, ARGV[8])
local other_count = #waiting
if handed_over and redis.call('PTTL', KEYS[3]) > tonumber(ARGV[5]) then
  -- The other servers expect a later end than the new hold has. This notice makes them try.
  for _, channel in ipairs(waiting) do
    redis.pcall('PUBLISH', channel, hold[3] .. ' ' .. KEYS[3])
  end
end
if ARGV[10] == '1' then
  waiting[#waiting + 1] = ARGV[8]
end
-- Write every field, so that only `notify` is left of a hold that was handed over. A grant may still rest on
-- an older hold of this node, so mark it as shared: the undo of this attempt must not delete it.
redis.call('HSET', KEYS[3], 'digest', ARGV[2], 'nonce', ARGV[3], 'shared', is_older and '1' or '0',
  'token', digits, 'holder', ARGV[4], 'ttl_ms', ARGV[5], 'notify', table.concat(waiting, ' '))
redis.call('PEXPIRE', KEYS[3], ARGV[5])
return granted(ARGV[3], token, other_count, handed_over and 1 or 0)
