-- readmit: end one quarantine; the node votes again, with numbers above everything it may have forgotten.
--
-- KEYS  1 node, 2 high: as in mint.lua
-- ARGV  1 id of the quarantine
--       2 its state: 'quarantined' or 'recovering'
--       3 admission id to give: random
--       4 floor, as the others were told
--       5 changes to begin with, as the others were told
--       6 run_id of the present run
--       7 '1' if the present run loses nothing at a crash, else '0'
--       8 how many keys the node has evicted in this run
--       9 and on: for each place of the cluster, by index, the least floor that a node must have to vote there
-- Returns  {'readmitted'}
--          {'changed'}     the node is not in that quarantine any more, or another server has claimed a greater floor for it;
--                          nothing was changed
--
-- Atomic because the node may have been lost a second time, or brought back by another server, meanwhile.
local identity = redis.call('HMGET', KEYS[1], 'admission', 'state', 'floor')
-- Said so that what is no number is refused as well.
local is_no_less = tonumber(ARGV[4]) >= tonumber(identity[3] or 0)
if identity[1] ~= ARGV[1] or identity[2] ~= ARGV[2] or not is_no_less then
  return {'changed'}
end
-- What an operator recovers may have gone on past the floor before it was taken out.
if not (tonumber(redis.call('GET', KEYS[2]) or 0) >= tonumber(ARGV[4])) then
  redis.call('SET', KEYS[2], ARGV[4])
end
for place = 0, #ARGV - 9 do
  if tonumber(ARGV[place + 9]) > tonumber(redis.call('HGET', KEYS[1], 'floor:' .. place) or 0) then
    -- The changes are those of before that floor.
    redis.call('HSET', KEYS[1], 'floor:' .. place, ARGV[place + 9], 'changes:' .. place, '0')
  end
end
redis.call('HSET', KEYS[1], 'state', 'ready', 'admission', ARGV[3], 'floor', ARGV[4], 'changes', ARGV[5], 'run_id', ARGV[6],
  'durable', ARGV[7], 'evicted', ARGV[8])
return {'readmitted'}
