"""Plans for operators, from measured costs: `seamflow planning`.

    role_placement.py   a search for the roles of each node                  ReaL, RLHFuse
    timeline.py         the time of an iteration under a placement
    chart_values.py     a plan as node pools of the Helm chart

The split of nodes between generation and training (StreamRL, Alg. 1) is in
`scheduler.policy.node_split`.
"""
