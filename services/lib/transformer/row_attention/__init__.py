"""Attention within packed rows.

context_group.py     the ranks that share the tokens of rows: heads for tokens, and back
packed_attention.py  what the attention layers of a model call
sdpa_rows.py         torch's scaled dot-product attention, rows of similar length together
"""
