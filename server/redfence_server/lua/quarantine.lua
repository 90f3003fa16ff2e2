-- quarantine: take a node's vote away, because it may have forgotten what it promised.
--
-- KEYS  1 node, 2 high: as in mint.lua
-- ARGV  1 admission id found before the decision, '' for no identity
--       2 run_id found before the decision, '' for no identity
--       3 id of this quarantine: random, and never an admission id
--       4 state to take: 'quarantined'; 'recovering' or 'retired' if an operator does it
--       5 cluster id, 6 node index, 7 number of nodes, 8 greatest ttl in ms: what it is configured as
--       9 run_id of the present run
--      10 the least floor that a node at this place is known to need; 0 for none
-- Returns  {'quarantined'}
--          {'changed'}     the identity is not the one the decision was made on: look again; nothing was changed
--          {'not_empty'}   the node has no identity and yet holds keys, which may be anybody's; nothing was changed
--
-- What is left of holds, counters and numbers stays, and is of no use to anybody: no script runs under the id of a quarantine.
-- The holds expire while it lasts, and when it ends every number starts above the floor.
--
-- The floor tells the node that forgot from one that has been replaced since: a server that knows of a greater one does not bring it back.
--
-- Atomic because another server may have quarantined the node, or brought it back, meanwhile.
local identity = redis.call('HMGET', KEYS[1], 'admission', 'run_id', 'floor')
if (identity[1] or '') ~= ARGV[1] or (identity[2] or '') ~= ARGV[2] then
  return {'changed'}
end
if not identity[1] and redis.call('DBSIZE') ~= 0 then
  return {'not_empty'}
end
redis.call('HSET', KEYS[1], 'cluster_id', ARGV[5], 'index', ARGV[6], 'nodes', ARGV[7], 'max_ttl_ms', ARGV[8],
  'admission', ARGV[3], 'run_id', ARGV[9], 'durable', '0', 'state', ARGV[4])
if tonumber(ARGV[10]) > tonumber(identity[3] or 0) then
  redis.call('HSET', KEYS[1], 'floor', ARGV[10])
end
return {'quarantined'}
