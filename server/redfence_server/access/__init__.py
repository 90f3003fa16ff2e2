"""Identify callers and check their rights: credentials, the policy, the audit log. No gRPC, and no Redis.

`policy` decides and is pure; `policy_file`, `tokens` and `jwt_tokens` read the operator's files. `rules` has
everything that the files say, as one value. `guard` turns the metadata of a call into a `Caller`, and holds
the rules that apply now; `setup` builds it from the settings. `watch` ends the stream of a caller whose
credentials expire. `audit` writes what callers did.
"""
