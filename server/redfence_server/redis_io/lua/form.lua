-- form: give an empty node its node index in a new cluster, or confirm the index that it has.
--
-- KEYS  1 node, 2 high: as in mint.lua
-- ARGV  1 cluster id
--       2 node index
--       3 number of nodes
--       4 greatest ttl the cluster allows, in ms
--       5 admission id to give
--       6 the node's run_id
--       7 state to reach: 'forming'; 'assembled' once every node is forming; 'ready' once each is assembled
--       8 '1' if the node's present run loses nothing at a crash, else '0'
--       9 how many keys the node has evicted in this run
--       10 the floor of the cluster's tokens: the first is above it; 0 for a new cluster without a past
-- Returns  {'formed'}      the node has this identity and state
--          {'not_empty'}   the node holds keys but no identity; nothing was changed
--          {'ahead'}       the node has this identity, but is not in the state before; nothing was changed
--          {'other'}       the node has another identity, or none; nothing was changed
--
-- Atomic because two operators may form at the same time. A node that already holds keys must never get an
-- identity, because it would vote as if it had never forgotten.
--
-- The floor becomes the greatest token that the node knows, as if all tokens up to it were granted before.
local identity = redis.call('HMGET', KEYS[1], 'cluster_id', 'index', 'nodes', 'state')
if not identity[1] then
  if ARGV[7] ~= 'forming' then
    return {'other'}
  end
  if redis.call('DBSIZE') ~= 0 then
    return {'not_empty'}
  end
  redis.call('SET', KEYS[2], ARGV[10])
  redis.call('HSET', KEYS[1], 'cluster_id', ARGV[1], 'index', ARGV[2], 'nodes', ARGV[3],
    'max_ttl_ms', ARGV[4], 'admission', ARGV[5], 'run_id', ARGV[6], 'durable', ARGV[8], 'evicted', ARGV[9],
    'state', 'forming')
  return {'formed'}
end
if identity[1] ~= ARGV[1] or identity[2] ~= ARGV[2] or identity[3] ~= ARGV[3] then
  return {'other'}
end
-- A repeated command may bring a greater floor. After the first vote it is too late for it.
if identity[4] ~= 'ready' and tonumber(ARGV[10]) > tonumber(redis.call('GET', KEYS[2]) or 0) then
  redis.call('SET', KEYS[2], ARGV[10])
end
local before = {assembled = 'forming', ready = 'assembled'}
if identity[4] == before[ARGV[7]] then
  redis.call('HSET', KEYS[1], 'state', ARGV[7])
elseif identity[4] ~= ARGV[7] then
  return {'ahead'}
end
return {'formed'}
