"""The weights process: allocates versions, keeps manifests, serves shards."""
