"""Plans from measured costs, for people: `python -m tools.planning`.

    tail_migration.py   when the tail of a batch moves to few instances      RLHFuse, R_t and m
    role_placement.py   which roles each node carries, found by search       ReaL, RLHFuse
    timeline.py         the time of an iteration under a placement

The split of nodes between generation and training (StreamRL, Alg. 1) is in
`scheduler.model.node_split`.
"""
