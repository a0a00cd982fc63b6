"""How many nodes do what: plans from measured costs, as pure functions.

    profile.py      seconds of a stage by number of nodes
    allocation.py   nodes split between generation and training    StreamRL, Alg. 1
    migration.py    when the tail of a batch moves together        RLHFuse, R_t and m
    placement.py    which roles each node carries, by search       ReaL, RLHFuse
    roofline.py     which nodes train                              SeamlessFlow, train_priority

While a run goes on, `scheduler.balance` asks `allocation.adjusted` whether one more node should
generate. `wire.py` answers the contract's PlanSplit, `cli.py` a person's
`python -m scheduler.planning`.
"""
