-- hold: read the hold of a resource. Not a script: scripts.py puts it where a script says `include hold.lua`.
-- A hot path does without it, because a node takes as long to define the function as for a small command.
--
-- The value of a lock key is one string, because each written key costs the append-only file a command:
--
--   DIGEST TOKEN SHARED TTL_MS NONCE[ CHANNEL...]\nHOLDER
--
-- SHARED is 1 if a retry of the lease shares the hold, else 0. A notice of the end goes to each CHANNEL. The
-- holder comes last: it is any text. The digest comes first: release and renew compare it, and then read only
-- what they need.
--
-- Earlier servers wrote a hash. It stays a hash while they can need it: until the hold ends, a retry of its
-- lease shares it, or a commit raises it. An earlier server meets this string with an error (WRONGTYPE) and
-- changes nothing, so it counts no vote of this node for the resource.
--
-- Returns nothing if the lock is free; else, each as text: digest, token, shared, ttl_ms, nonce, notify (each
-- channel behind a space), holder; and true for a hash. Any other value is an error, never a free lock.
local function read_hold(key, text)
  text = text or redis.pcall('GET', key)
  if not text then
    return
  end
  local digest, token, shared, ttl_ms, nonce, notify, holder, is_hash
  if type(text) == 'string' then
    digest, token, shared, ttl_ms, nonce, notify, holder =
      string.match(text, '^(%S*) (%d+) ([01]) (%d+) (%S*)([^\n]*)\n(.*)$')
  else
    digest, token, shared, ttl_ms, nonce, notify, holder =
      unpack(redis.call('HMGET', key, 'digest', 'token', 'shared', 'ttl_ms', 'nonce', 'notify', 'holder'))
    notify = notify and notify ~= '' and ' ' .. notify or ''
    is_hash = true
  end
  if not (digest and token) then
    error(key .. ' holds no hold: another program has written it')
  end
  return digest, token, shared, ttl_ms, nonce, notify, holder, is_hash
end
