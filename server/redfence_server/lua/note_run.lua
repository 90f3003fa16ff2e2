-- note_run: note which run of the node's process is admitted, and whether that run loses nothing at a crash.
--
-- KEYS  1 node: as in mint.lua
-- ARGV  1 admission id found before the decision
--       2 run_id found before the decision
--       3 run_id of the present run
--       4 '1' if the present run is durable, else '0'
-- Returns  {'noted'}
--          {'changed'}     the identity is not the one the decision was made on: look again; nothing was changed
--
-- Atomic because another server may have quarantined or admitted the node meanwhile.
local identity = redis.call('HMGET', KEYS[1], 'admission', 'run_id')
if identity[1] ~= ARGV[1] or identity[2] ~= ARGV[2] then
  return {'changed'}
end
redis.call('HSET', KEYS[1], 'run_id', ARGV[3], 'durable', ARGV[4], 'evicted', '0')
return {'noted'}
