-- restore_vote: end one quarantine; the node votes again, with tokens above all that it may have forgotten.
--
-- KEYS  1 node, 2 high: as in mint.lua
-- ARGV  1 id of the quarantine
--       2 admission id to give: random
--       3 the floor, as it was reserved
--       4 run_id of the present run
--       5 '1' if the present run loses nothing at a crash, else '0'
--       6 how many keys the node has evicted in this run
--       7 and on: for each node index the least floor that a process there needs to vote; 0 for none. Then as
--         many ids: the first digits of the quarantine's id for which each floor was raised; '' if not known
-- Returns  {'restored'}
--          {'changed'}     the node has left that quarantine or reserved another floor; nothing was changed
--
-- `voted_floor` is the floor under which this process voted last: a reservation may have raised `floor`.
--
-- A node that restarted with proof keeps its holds. Others wait until every hold ended: see `waited_floor`.
--
-- Atomic because another server may quarantine the node, or restore its vote, at the same time.
local identity = redis.call('HMGET', KEYS[1], 'admission', 'state', 'reserved')
if identity[1] ~= ARGV[1] or identity[2] == 'ready' or identity[3] ~= ARGV[3] then
  return {'changed'}
end
-- Negated comparison, so that NaN is rejected too.
if not (tonumber(redis.call('GET', KEYS[2]) or 0) >= tonumber(ARGV[3])) then
  redis.call('SET', KEYS[2], ARGV[3])
end
local count = math.floor((#ARGV - 6) / 2)
for index = 0, count - 1 do
  if tonumber(ARGV[7 + index]) > tonumber(redis.call('HGET', KEYS[1], 'floor:' .. index) or 0) then
    -- Never a whole id: the floor was not raised here, so it does not count for a fence.
    local fence = ARGV[7 + count + index]
    redis.call('HSET', KEYS[1], 'floor:' .. index, ARGV[7 + index], 'fence:' .. index, fence)
    if fence == '' then
      redis.call('HDEL', KEYS[1], 'fence:' .. index)
    end
  end
end
if identity[2] ~= 'restarted' then
  redis.call('HSET', KEYS[1], 'waited_floor', ARGV[3])
end
redis.call('HDEL', KEYS[1], 'reserved')
redis.call('HSET', KEYS[1], 'state', 'ready', 'admission', ARGV[2], 'run_id', ARGV[4], 'durable', ARGV[5],
  'evicted', ARGV[6], 'voted_floor', ARGV[3])
return {'restored'}
