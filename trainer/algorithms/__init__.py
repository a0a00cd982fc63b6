"""The built-in algorithms, one small file each, and the terms they are composed of.

In `terms/`: `baselines.py` computes advantages, `importance.py` importance weights,
`loss_aggregation.py` token weights; `policy_gradient.py` is the loss that most of them share.
"""
