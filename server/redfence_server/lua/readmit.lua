-- readmit: note that a node which restarted has proven that it forgot nothing.
--
-- KEYS  1 node: as in mint.lua
-- ARGV  1 admission id found before the decision
--       2 run_id found before the decision
--       3 run_id of the present run
-- Returns  {'readmitted'}
--          {'changed'}     the identity is not the one the decision was made on: look again; nothing was changed
--
-- Atomic because another server may have quarantined or readmitted the node meanwhile.
local identity = redis.call('HMGET', KEYS[1], 'admission', 'run_id')
if identity[1] ~= ARGV[1] or identity[2] ~= ARGV[2] then
  return {'changed'}
end
redis.call('HSET', KEYS[1], 'run_id', ARGV[3])
return {'readmitted'}
