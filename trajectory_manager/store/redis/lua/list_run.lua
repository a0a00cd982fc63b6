-- Lists a run among all runs. KEYS: the set of all runs. ARGV: run_id.
redis.call('SADD', KEYS[1], ARGV[1])
return {'ok'}
