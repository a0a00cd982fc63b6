"""The zoo is whole, a folder is refused before anything starts, and faults of a run are noticed."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.lib.model_files.json_file import check_attention
from tests.suites.models.__main__ import refusal_problems, training_problems
from tests.suites.models.architectures import ARCHITECTURES
from tests.suites.models.model_run import CONFIG_EXIT, Outcome
from tests.suites.models.refusals import REFUSALS

_MIN_TRAINED = 14


_GOOD_STEP = {
    "train_rollout_logprob_abs_diff": 1e-7,
    "log_ratio_squared_mean": 1e-13,
    "num_tokens": 256.0,
    "grad_norm": 1.0,
    "max_staleness": 0.0,
}


def test_every_architecture_is_either_trained_or_refused() -> None:
    """None is left out of both."""
    trained = {name for name, each in ARCHITECTURES.items() if each.trains}
    assert len(trained) >= _MIN_TRAINED
    assert set(ARCHITECTURES) - trained <= set(REFUSALS)
    assert not trained & set(REFUSALS)


@pytest.mark.parametrize("name", [name for name, each in ARCHITECTURES.items() if each.trains])
def test_a_model_of_attention_layers_is_accepted(tmp_path: Path, name: str) -> None:
    """By the check that the launcher does first."""
    ARCHITECTURES[name].make(tmp_path, 0)
    check_attention(tmp_path)


def _outcome(**changes: float) -> Outcome:
    step = _GOOD_STEP | changes
    return Outcome(exit_code=0, output="", steps=[_GOOD_STEP, step], processes=[])


def test_what_a_run_should_not_show_is_noticed() -> None:
    """Each figure for itself; a good run has no problem."""
    assert training_problems(_outcome()) == []
    assert "may differ" in training_problems(_outcome(log_ratio_squared_mean=1e-6))[0]
    assert "may differ" in training_problems(_outcome(log_ratio_squared_mean=float("nan")))[0]
    assert "no gradient" in training_problems(_outcome(grad_norm=0.0))[0]
    assert "older weights" in training_problems(_outcome(max_staleness=1.0))[0]


def test_what_a_refusal_should_not_do_is_noticed(tmp_path: Path) -> None:
    """Another exit code, a process that started, two lines, a line about something else."""
    line = f"launcher: model {tmp_path}: has no tokenizer"
    refusal = REFUSALS["no-tokenizer"]

    def problems(code: int, output: str, *processes: str) -> list[str]:
        outcome = Outcome(exit_code=code, output=output, steps=[], processes=list(processes))
        return refusal_problems(refusal, tmp_path, outcome)

    assert problems(CONFIG_EXIT, line) == []
    assert len(problems(1, line)) == 1
    assert len(problems(CONFIG_EXIT, line, "redis.log")) == 1
    assert len(problems(CONFIG_EXIT, f"{line}\nmore")) == 1
    assert len(problems(CONFIG_EXIT, "launcher: something")) == 1
