-- Values that are stored with a rollout. KEYS: header, columns. Answers "column sample_id" and "epoch:values".
return {'ok', redis.call('HGETALL', KEYS[2])}
