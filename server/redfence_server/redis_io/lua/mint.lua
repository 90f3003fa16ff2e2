-- mint: give a lease the lock on this node if it is free, with the next token of the resource. A handover
-- first ends another lease that holds the lock, in the same step.
--
-- KEYS  1 node     hash    this node's identity. Read here: `admission`; `floor`, the greatest token that may
--                          have been minted at this index and forgotten; `waited_floor`, the floor of the
--                          last return after a wait, during which every hold up to it has ended
--       2 high     string  greatest token that this node ever minted or learnt, for any resource
--       3 lock     string  the hold of the resource, as in hold.lua; expires with the lease
--       4 counter  string  last token minted or learnt for the resource; expires when idle
-- ARGV  1 admission id under which the server was admitted
--       2 digest of the lease id
--       3 nonce: the id of this attempt
--       4 holder label
--       5 ttl in ms
--       6 how long an unused counter is kept, in ms
--       7 'BLOCKING OWN CHANNEL ENDED', one argument, because each further argument costs the node CPU time:
--         '1' for a notice when the hold that refuses this mint ends, else '0'; the same for the hold that
--         this mint makes; the channel of this server; the digest of the lease to release first, or ''
--       8 lock delay in ms; missing for none
-- Returns  {'granted', nonce, token, others, released, clock_us}
--                     the lease holds the lock here; nonce and token of *this hold*; how many other servers
--                     want a notice of its end; 1 if a lease was released first, else 0; the node's clock,
--                     because the vote of a node whose clock was set does not count
--          {'held', digest, token, holder, pttl_ms[, lock_delay_ms]}
--                     another lease holds the lock, or the lock is closed after a lease, perhaps this very
--                     one; nothing was released. The lock opens after pttl_ms without a renewal. With a lock
--                     delay, the lock is closed if pttl_ms is no more than lock_delay_ms
--          {'exhausted'}      no token below 2^53 is left; nothing was changed
--          {'not_admitted'}   the node has another admission id, or has lost its `high`; nothing was changed
-- Publishes  as release.lua, if after a handover the lock is held for a shorter time
--
-- The list of channels ends with the hold: a waiting server adds itself to the next hold when its mint is
-- refused. A handover passes the list on.
--
-- Atomic because the counter must grow in the step that takes the lock. In between, another attempt could
-- take the lock and a smaller token.
local node = redis.call('HMGET', KEYS[1], 'admission', 'floor', 'waited_floor')
local found = redis.call('MGET', KEYS[2], KEYS[3], KEYS[4])
local high = tonumber(found[1] or nil)
if node[1] ~= ARGV[1] or not (high and high >= 0) then
  return {'not_admitted'}
end
local floor = tonumber(node[2] or 0)

local text = found[2]
local own_channel = ''
if string.byte(ARGV[7], 3) == 49 then -- '1'
  own_channel = ' ' .. string.match(ARGV[7], '^%d %d (%S+)')
end
local life_ms, delay_line = ARGV[5], ''
if ARGV[8] then
  life_ms, delay_line = ARGV[5] + ARGV[8], '\n' .. ARGV[8]
end
-- MGET shows a hash as a free lock. SET NX leaves it alone, and the second round reads it.
for _ = 1, 2 do
  -- The new hold inherits the channels of other servers from a hold that makes room.
  local condition, shared, notify, other_count, released, told_of = 'NX', '0', '', 0, 0, nil
  if text ~= false then
    -- include hold.lua
    local digest, stored, was_shared, ttl_ms, nonce, channels, tail, is_hash = read_hold(KEYS[3], text)
    local blocking, channel, ended = string.match(ARGV[7], '^(%d) %d (%S+) (%S*)$')
    condition = 'XX'
    -- The wait outlasted every hold up to its floor; such a hold is left because a clock went back.
    if tonumber(stored) > tonumber(node[3] or 0) then
      for each in string.gmatch(channels, '%S+') do
        if each ~= channel then
          notify, other_count = notify .. ' ' .. each, other_count + 1
        end
      end

      local holder, left_ms, delay_ms, is_closed = read_tail(KEYS[3], tail)
      if digest ~= ended and (digest ~= ARGV[2] or is_closed) then
        -- After 64 servers, further ones wait for the expiry. A substring is a channel: all have the same
        -- length.
        if blocking == '1' and not string.find(channels, channel, 1, true) and other_count < 64 then
          channels = channels .. ' ' .. channel
          if is_hash then
            redis.call('HSET', KEYS[3], 'notify', string.sub(channels, 2))
          else
            local fields = table.concat({digest, stored, was_shared, ttl_ms, nonce}, ' ')
            redis.call('SET', KEYS[3], fields .. channels .. '\n' .. tail, 'KEEPTTL')
          end
        end
        return {'held', digest, tonumber(stored), holder, left_ms, delay_ms > 0 and delay_ms or nil}
      end

      -- A process that restarted with proof keeps its holds. But if it is a copy of an older process, greater
      -- tokens were granted since. So a retry of the lease gets a new token. A grant may still rest on the
      -- older hold, so mark it as shared: the undo of this attempt must not delete it.
      local is_older = digest == ARGV[2] and tonumber(stored) <= floor
      shared = is_older and '1' or '0'
      if digest == ended then
        -- A closed lock opens for the next waiter too: its last holder has said that it stopped.
        released = is_closed and 0 or 1
        if left_ms > tonumber(life_ms) then
          told_of = stored
        end
      elseif not is_older then
        -- A retried Acquire of the lease that holds the lock. The undo of the first attempt must no longer
        -- delete the hold, because another server may be granting it now.
        channels = own_channel == '' and channels or notify .. own_channel
        local fields = table.concat({digest, stored, '1', ARGV[5], nonce}, ' ')
        redis.call('SET', KEYS[3], fields .. channels .. '\n' .. holder .. delay_line, 'PX', life_ms)
        local clock = redis.call('TIME')
        return {'granted', nonce, tonumber(stored), other_count, 0, clock[1] * 1000000 + clock[2]}
      end
    end
  end

  -- A counter that was dropped as idle starts again at `high`, which is never smaller. A counter from before
  -- the node forgot other keys may be too low; the floor is not.
  local token = math.max(tonumber(found[3] or high), floor) + 1
  -- Negated comparison, so that NaN is rejected too.
  if not (token < 9007199254740992) then
    return {'exhausted'}
  end
  -- tostring() would print a large number as a float.
  local digits = string.format('%.0f', token)
  local hold = ARGV[2] .. ' ' .. digits .. ' ' .. shared .. ' ' .. ARGV[5] .. ' ' .. ARGV[3] .. notify
    .. own_channel .. '\n' .. ARGV[4] .. delay_line
  -- The numbers come first: no hold ever stands above them.
  redis.call('SET', KEYS[4], digits, 'PX', ARGV[6])
  if token > high then
    redis.call('SET', KEYS[2], digits)
  end
  if redis.call('SET', KEYS[3], hold, condition, 'PX', life_ms) then
    if told_of then
      -- The other servers expect a later end than the new hold has. This notice makes them try.
      for channel in string.gmatch(notify, '%S+') do
        redis.pcall('PUBLISH', channel, told_of .. ' ' .. KEYS[3])
      end
    end
    local clock = redis.call('TIME')
    return {'granted', ARGV[3], token, other_count, released, clock[1] * 1000000 + clock[2]}
  end
  text = nil
end
