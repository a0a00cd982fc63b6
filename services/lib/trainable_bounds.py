"""What a sample may hold so that training in float32 survives it; greater values are mistakes.

The gateway and the trajectory manager refuse others where they enter, the trainer rejects the rest.
"""

from __future__ import annotations

MIN_TEMPERATURE = 0.01
"""Of sampling: below it, log-probs differ between engine and trainer by rounding alone."""
MAX_REWARD = 1e12
"""Greatest magnitude of a reward, and of the sum of a rollout's rewards of one name: its square,
summed over a batch, is finite in float32."""
MIN_LOGPROB = -80.0
"""Least log-prob of a sampled token: none is ever drawn with probability e^-80, and beyond e^88 an
importance ratio is infinite in float32."""
MAX_LOGPROB = 0.01
"""Greatest log-prob, above 0 by no more than rounding in bfloat16."""
