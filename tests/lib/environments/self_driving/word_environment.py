"""An environment of verifiers 0.3: say the word that is asked for."""

from __future__ import annotations

from typing import Any

import verifiers as vf
from datasets import Dataset

from tests.lib.environments.self_driving.words import TASKS, score

__all__ = ["load_environment"]


def said(completion: Any, answer: str, **_: Any) -> float:
    """As `score` says."""
    return score(answer, _text(completion))


def length(completion: Any, **_: Any) -> float:
    """Words of the answer."""
    return float(len(_text(completion).split()))


def _text(completion: Any) -> str:
    last = completion[-1]
    content = last["content"] if isinstance(last, dict) else last.content
    return str(content or "")


def load_environment() -> Any:
    """A task for each word; the score of the last one raises."""
    rows = [{"question": f"say {word}", "answer": word} for word in TASKS]
    rubric = vf.Rubric(funcs=[said, length], weights=[1.0, 0.0])
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=rubric)
