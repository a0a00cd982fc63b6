-- Adds a run to the set of all runs. KEYS: that set. ARGV: run_id.
redis.call('SADD', KEYS[1], ARGV[1])
return {'ok'}
