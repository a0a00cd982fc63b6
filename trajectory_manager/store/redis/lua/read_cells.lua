-- The column values of a rollout's samples. KEYS: header, columns. Returns "column sample_id" and "epoch:values".
return {'ok', redis.call('HGETALL', KEYS[2])}
