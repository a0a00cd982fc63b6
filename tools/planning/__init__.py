"""Plans for operators, from measured costs: `python -m tools.planning`.

    tail_migration.py   when the tail of a batch moves to few instances      RLHFuse, R_t and m
    role_placement.py   a search for the roles of each node                  ReaL, RLHFuse
    timeline.py         the time of an iteration under a placement

The split of nodes between generation and training (StreamRL, Alg. 1) is in
`scheduler.model.node_split`.
"""
