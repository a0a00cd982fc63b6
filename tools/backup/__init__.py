"""Backup and restore of a run's state: Redis, checkpoints and weights, `seamflow backup`.

    save.py       a snapshot of Redis with the checkpoint and the weights that belong to it
    restore.py    the same into an empty Redis and empty folders
    snapshot.py   the snapshot, from the server as a replica gets it
    contents.py   what a backup holds, with checksums

Consistent means: committed step of the snapshot <= step of the checkpoint <= newest leased step.
The resumed trainer then commits the steps in between, and no committed sample is trained again or
lost.
"""
