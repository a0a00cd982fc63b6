-- Deletes all keys of a run whose rollouts are deleted.
redis.call('UNLINK', unpack(KEYS))
return {'ok'}
