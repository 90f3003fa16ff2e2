-- mint: grant this lease the lock on this node if it is free, with the next token of the resource. As a hand-over, end the
-- lease that holds it in the same step.
--
-- KEYS  1 node     hash    this node's identity. Read here: `admission`; `floor`, up to which tokens may have been minted at
--                          this node index and forgotten; `waited_floor`, the floor of the last return after a wait,
--                          during which every hold up to it has ended
--       2 high     string  greatest number this node ever minted or learnt, for any resource
--       3 lock     hash    the hold of the resource: digest, nonce, shared, token, holder, ttl_ms, notify;
--                          expires with the lease
--       4 counter  string  last number minted or learnt for the resource; expires when idle
-- ARGV  1 admission id under which the server was admitted
--       2 digest of the lease id
--       3 nonce: the id of this attempt
--       4 holder label
--       5 ttl in ms
--       6 how long an unused counter is kept, in ms
--       7 digest of the lease to end first, or ''
--       8 channel of this server
--       9 '1' to be told on that channel when the hold that is in the way has ended, else '0'
--      10 '1' to be told when the hold that is made here has ended, else '0'
-- Returns  {'granted', nonce, token, others, released, clock_us}
--                                the lease holds the lock here; nonce and token are those of *this hold*; how many other
--                                servers want to be told of its end; 1 if a lease was ended first, else 0; the node's
--                                clock, for a vote of a clock that was set does not count
--          {'held', digest, token, holder, pttl_ms}   another lease does; nothing was ended
--          {'exhausted'}                              the numbers below 2^53 are used up; nothing changed
--          {'not_admitted'}                           the node is not the one the server was admitted to, or
--                                                     has lost its `high`; nothing changed
-- Publishes  as release.lua, if a hand-over makes the time shorter for which the lock is held
--
-- `notify` lists the channels on which the end of the hold is told, separated by spaces. It is part of the hold, so it is
-- gone with it: every server that waits puts itself down on the next hold when its own mint is refused. A hand-over passes it on.
--
-- Atomic because the number must grow in the same step that takes the lock: between the two, another attempt
-- could take the lock and a smaller number.
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
  -- The wait has outlived every hold: this one is left because a clock went back.
  hold = {}
end
-- The process restarted with proof, and its holds last. But if it is a copy of an older process, others were granted greater
-- tokens since. So a retry of the lease gets a new token and not that one.
local is_older = hold[1] == ARGV[2] and tonumber(hold[3]) <= floor
local notify = hold[5] or ''
local handed_over = hold[1] and hold[1] == ARGV[7]

if hold[1] and not handed_over and hold[1] ~= ARGV[2] then
  -- Servers beyond the 64th wait for the expiry alone. A substring is the channel, for all are of one length.
  if ARGV[9] == '1' and not string.find(notify, ARGV[8], 1, true) and #split(notify, ARGV[8]) < 64 then
    redis.call('HSET', KEYS[3], 'notify', notify == '' and ARGV[8] or notify .. ' ' .. ARGV[8])
  end
  return {'held', hold[1], tonumber(hold[3]), hold[4], redis.call('PTTL', KEYS[3])}
end

if hold[1] and not handed_over and not is_older then
  -- A retried Acquire of the lease that holds the lock. The first attempt's undo must no longer delete the hold:
  -- another server may be granting it just now.
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

-- A counter that was dropped as idle starts again at `high`, which is no less than it ever was. One that a node has kept
-- from before it forgot others may be too low; the floor is not.
local counter = tonumber(redis.call('GET', KEYS[4]) or high)
local token = math.max(counter, floor) + 1
-- Said so that what is no number is refused as well.
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
  -- The other servers wait for an end that is later than the end of the new hold. This notice makes them look.
  for _, channel in ipairs(waiting) do
    redis.pcall('PUBLISH', channel, hold[3] .. ' ' .. KEYS[3])
  end
end
if ARGV[10] == '1' then
  waiting[#waiting + 1] = ARGV[8]
end
-- Every field is written anew, so nothing of a hold that is handed over is left but whom to tell. The grant of an older hold
-- may still stand on this node, so no undo of this attempt may delete it.
redis.call('HSET', KEYS[3], 'digest', ARGV[2], 'nonce', ARGV[3], 'shared', is_older and '1' or '0', 'token', digits,
  'holder', ARGV[4], 'ttl_ms', ARGV[5], 'notify', table.concat(waiting, ' '))
redis.call('PEXPIRE', KEYS[3], ARGV[5])
return granted(ARGV[3], token, other_count, handed_over and 1 or 0)
