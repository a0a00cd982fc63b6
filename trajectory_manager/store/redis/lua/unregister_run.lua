-- Removes a run from the set of all runs. KEYS: that set. ARGV: run_id.
redis.call('SREM', KEYS[1], ARGV[1])
return {'ok'}
