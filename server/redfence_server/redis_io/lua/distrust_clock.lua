-- distrust_clock: note that this node's clock was set; for a time no server counts its votes for new grants.
--
-- KEYS  1 node: as in mint.lua. Field `distrusted_until` is the end of that time, in ms of this node's clock.
-- ARGV  1 admission id
--       2 how long from now, in ms
--       3 the longest time that a step can cost, in ms: the greatest ttl and its drift
-- Returns  {'noted'}
--          {'not_admitted'}  as in mint.lua
--
-- Atomic because two servers may note a step at the same time; the later end stays.
local identity = redis.call('HMGET', KEYS[1], 'admission', 'distrusted_until')
if identity[1] ~= ARGV[1] then
  return {'not_admitted'}
end
local clock = redis.call('TIME')
local now_ms = clock[1] * 1000 + math.floor(clock[2] / 1000)
local left_ms = tonumber(identity[2] or 0) - now_ms
-- More time than a step can cost is left only if the clock was set back since.
if left_ms < tonumber(ARGV[2]) or left_ms > tonumber(ARGV[3]) then
  redis.call('HSET', KEYS[1], 'distrusted_until', string.format('%.0f', now_ms + tonumber(ARGV[2])))
end
return {'noted'}
