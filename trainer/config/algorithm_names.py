"""The built-in algorithms by name, as paths: settings are checked without importing torch."""

from __future__ import annotations

import difflib

_HERE = "trainer.algorithms"
ALGORITHMS = {
    "cispo": f"{_HERE}.cispo:build",
    "dapo": f"{_HERE}.dapo:build",
    "decoupled_ppo": f"{_HERE}.decoupled_ppo:build",
    "distillation": f"{_HERE}.distillation:Distillation",
    "dpo": f"{_HERE}.dpo:build",
    "dr_grpo": f"{_HERE}.dr_grpo:build",
    "grpo": f"{_HERE}.grpo:build",
    "gspo": f"{_HERE}.gspo:build",
    "ma_ppo": f"{_HERE}.ma_ppo:build",
    "ppo": f"{_HERE}.ppo:build",
    "reinforce_pp": f"{_HERE}.reinforce_pp:build",
    "reinforce_pp_baseline": f"{_HERE}.reinforce_pp:build_with_baseline",
    "rloo": f"{_HERE}.rloo:build",
    "tba": f"{_HERE}.tba:build",
    "turn_ppo": f"{_HERE}.turn_ppo:build",
}


def check_algorithm_name(name: str) -> str:
    """The name, if it is a built-in or has the form of a plug-in.

    Raises:
        ValueError: it is neither; says what there is.
    """
    if ":" in name or name in ALGORITHMS:
        return name
    near = difflib.get_close_matches(name, ALGORITHMS, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    known = ", ".join(ALGORITHMS)
    raise ValueError(f'give one of {known}, or a plug-in "package.module:Name"{hint}')
