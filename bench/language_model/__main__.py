"""`make bench-model`: a language model of 135 million parameters, trained and measured.

Each part writes a result of its own. --quick makes a short form and writes no result.
"""

from __future__ import annotations

import argparse

from bench.language_model import beside_trl, learning
from bench.language_model.decoding import measure_decoding
from bench.language_model.trained_tokens import measure_served_type, measure_trained_tokens
from bench.language_model.variants import measure_lora, measure_sglang, measure_tools

_PARTS = {
    "learning": learning.measure,
    "trl": beside_trl.measure,
    "tools": measure_tools,
    "lora": measure_lora,
    "sglang": measure_sglang,
    "decoding": measure_decoding,
    "tokens": measure_trained_tokens,
    "served_type": measure_served_type,
}


def main() -> None:
    """Measure the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two steps, no result")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=list(_PARTS))
    given = parser.parse_args()
    if given.quick:
        learning.quick()
        return
    for part in given.parts:
        _PARTS[part](given.seeds)


if __name__ == "__main__":
    main()
