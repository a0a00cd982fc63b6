"""Attention within packed rows.

packed_attention.py  what the attention layers of a model call, and the kernels below by name
sdpa_rows.py         what a kernel is; torch's own attention, rows of similar length together
varlen_rows.py       a kernel that takes rows of any length one after the other, on cuda
"""
