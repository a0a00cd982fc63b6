"""The built-in algorithms by name, as paths: settings are checked without importing torch."""

from __future__ import annotations

import difflib

_HERE = "trainer.algorithms"
ALGORITHMS = {
    "cispo": f"{_HERE}.critic_free:cispo",
    "dapo": f"{_HERE}.critic_free:dapo",
    "decoupled_ppo": f"{_HERE}.critic_free:decoupled_ppo",
    "distillation": f"{_HERE}.critic_free:Distillation",
    "dpo": f"{_HERE}.groupwise:dpo",
    "dr_grpo": f"{_HERE}.critic_free:dr_grpo",
    "grpo": f"{_HERE}.critic_free:grpo",
    "gspo": f"{_HERE}.critic_free:gspo",
    "ma_ppo": f"{_HERE}.actor_critic:ma_ppo",
    "ppo": f"{_HERE}.actor_critic:ppo",
    "reinforce_pp": f"{_HERE}.critic_free:reinforce_pp",
    "reinforce_pp_baseline": f"{_HERE}.critic_free:reinforce_pp_baseline",
    "rloo": f"{_HERE}.critic_free:rloo",
    "tba": f"{_HERE}.groupwise:tba",
    "turn_ppo": f"{_HERE}.actor_critic:turn_ppo",
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
