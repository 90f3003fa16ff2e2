-- quarantine: take a node's vote away, because its process is new, may have forgotten holds, or is to leave
-- its cluster.
--
-- KEYS  1 node: as in mint.lua
-- ARGV  1 admission id found before the decision, '' for no identity
--       2 run_id found before the decision, '' for no identity
--       3 id of this quarantine: random, and never an admission id
--       4 state to take: 'quarantined'; 'restarted' with proof that nothing was forgotten;
--         'retired' for a node that leaves its cluster
--       5 cluster id, 6 node index, 7 number of nodes, 8 greatest ttl in ms: what it is configured as
--       9 run_id of the present run
--      10 the least floor that a process at this index is known to need; 0 for none
--      11 '1' if the present run loses nothing at a crash, else '0'
-- Returns  {'quarantined'}
--          {'changed'}     the identity has changed since the decision, so examine again; nothing was changed
--          {'not_empty'}   the node has no identity but holds keys of an unknown owner; nothing was changed
--
-- Holds, counters and `high` stay, but no server is admitted under the id of a quarantine. A floor that an
-- earlier quarantine reserved does not count in this one.
--
-- The floor distinguishes a node that forgot from one that was replaced since: a server that knows a greater
-- floor does not restore this process's vote.
--
-- A node that goes over to another cluster names the one that it left as its predecessor. It has not voted in
-- the other one yet, so it drops `voted_floor`. The floors that it knows stay: a resize reserves greater ones.
--
-- Atomic because another server may quarantine the node, or restore its vote, at the same time.
local identity = redis.call('HMGET', KEYS[1], 'admission', 'run_id', 'floor', 'cluster_id')
if (identity[1] or '') ~= ARGV[1] or (identity[2] or '') ~= ARGV[2] then
  return {'changed'}
end
if not identity[1] and redis.call('DBSIZE') ~= 0 then
  return {'not_empty'}
end
if identity[4] and identity[4] ~= ARGV[5] then
  redis.call('HDEL', KEYS[1], 'voted_floor')
  redis.call('HSET', KEYS[1], 'predecessor', identity[4])
end
redis.call('HDEL', KEYS[1], 'reserved')
redis.call('HSET', KEYS[1], 'cluster_id', ARGV[5], 'index', ARGV[6], 'nodes', ARGV[7], 'max_ttl_ms', ARGV[8],
  'admission', ARGV[3], 'run_id', ARGV[9], 'durable', ARGV[11], 'state', ARGV[4])
if identity[2] ~= ARGV[9] then
  redis.call('HSET', KEYS[1], 'evicted', '0')
end
if tonumber(ARGV[10]) > tonumber(identity[3] or 0) then
  redis.call('HSET', KEYS[1], 'floor', ARGV[10])
end
return {'quarantined'}
