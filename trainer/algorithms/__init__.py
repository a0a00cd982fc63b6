"""The built-in algorithms, one small file each, and the pieces they are put together from.

`baselines.py` gives advantages, `importance.py` the weight of a token that other weights sampled,
`weights.py` what a token counts; `policy_gradient.py` is the loss they all share.
"""
