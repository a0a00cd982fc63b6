"""Backup and restore of a run's state: Redis, checkpoints and weights, `seamflow backup`.

    save.py             a snapshot of Redis with the checkpoint and the weights that belong to it
    backup_command.py   the command line, and the same into an empty Redis and empty folders
    snapshot.py         what a backup holds: the snapshot, and files with checksums

Consistent means: committed step of the snapshot <= step of the checkpoint <= newest leased step.
The resumed trainer then commits the steps in between, and no committed sample is trained again or
lost.
"""
