"""`make test-models`: each model folder is trained for two optimizer steps, or refused in one line.

Nothing may lie between: a run that starts and does not end well counts as a failure. Before, every
causal language model of transformers is computed beyond its windows by trainer, scorer and engine
(`kinds.py`).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from bench.report import Report
from tests.suites.models.architectures import ARCHITECTURES
from tests.suites.models.kinds import compare, kinds
from tests.suites.models.model_run import CONFIG_EXIT, STEPS, Outcome, launch
from tests.suites.models.refusals import REFUSALS, Refusal

_TRAINED = tuple(name for name, each in ARCHITECTURES.items() if each.trains)
_KINDS = "kinds"
_TOLERANCE = 1e-3
_MIN_GRADIENT = 1e-3


def main() -> None:
    """Run all and report."""
    names = (_KINDS, *_TRAINED, *REFUSALS)
    parser = argparse.ArgumentParser(prog="tests.suites.models", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--folder", type=Path, help="keep models, logs and records here")
    options = parser.parse_args()
    figures: dict[str, float] = {}
    problems: list[str] = []
    with tempfile.TemporaryDirectory(prefix="seamflow-models-") as scratch:
        folder = (options.folder or Path(scratch)).resolve()
        for name in options.only:
            started = time.monotonic()
            if name == _KINDS:
                found, wrong = _compared_kinds(folder / name, options.seed)
                figures |= found
            else:
                found, wrong = _try(name, folder / name, options.seed)
                found["seconds"] = round(time.monotonic() - started, 1)
                figures |= {f"{name}.{figure}": value for figure, value in found.items()}
            problems += [f"{name}: {each}" for each in wrong]
            print(f"{name}: {'; '.join(wrong) or 'well'}", file=sys.stderr, flush=True)
    ended = {"models_trained": (".optimizer_steps", STEPS), "models_refused": (".refused", 1)}
    for total, (end, wanted) in ended.items():
        figures[total] = sum(
            name.endswith(end) and value == wanted for name, value in figures.items()
        )
    figures["problems"] = len(problems)
    report = Report(bench="models", figures=figures, seeds=[options.seed])
    report.publish() if options.only == names else report.show()
    if problems:
        sys.exit("; ".join(problems))


def _compared_kinds(folder: Path, seed: int) -> tuple[dict[str, float], list[str]]:
    """Of a kind and a process that computes it: accepted and exact, refused, or silently wrong."""
    found = {kind.model_type: compare(kind, folder / kind.model_type, seed) for kind in kinds()}
    differences = [each for of in found.values() for each in of.differences.values()]
    silent = [
        f"{name} differs in {', '.join(of.silent)}" for name, of in found.items() if of.silent
    ]
    figures = {
        "kinds": len(found),
        "accepted": len(differences),
        "refused": sum(len(of.refusals) for of in found.values()),
        "silent": sum(len(of.silent) for of in found.values()),
        "largest_difference": max(differences, default=0.0),
    }
    return figures, silent


def _try(name: str, folder: Path, seed: int) -> tuple[dict[str, float], list[str]]:
    """Figures of one model folder, and what should be otherwise."""
    folder.mkdir(parents=True)
    model = folder / "model"
    if name in REFUSALS:
        REFUSALS[name].make(model)
        wrong = refusal_problems(REFUSALS[name], model, launch(model, folder, seed))
        return {"refused": float(not wrong)}, wrong
    ARCHITECTURES[name].make(model, seed)
    outcome = launch(model, folder, seed)
    wrong = training_problems(outcome)
    if not outcome.steps:
        return {"optimizer_steps": 0.0}, wrong
    return {
        "optimizer_steps": float(len(outcome.steps)),
        "logprob_diff_mean": outcome.logprob_diff,
        "logprob_diff_bound": outcome.logprob_diff_bound,
    }, wrong


def training_problems(outcome: Outcome) -> list[str]:
    """What is wrong with a run that should have trained."""
    if outcome.exit_code or len(outcome.steps) != STEPS:
        print(outcome.output[-4000:], file=sys.stderr)
        return [f"exit code {outcome.exit_code} after {len(outcome.steps)} steps"]
    wrong = []
    if not outcome.logprob_diff_bound <= _TOLERANCE:
        wrong.append(f"a log-prob may differ by {outcome.logprob_diff_bound:.2g}")
    # Without a gradient the second step has the weights of the first, and shows nothing.
    if not min(step["grad_norm"] for step in outcome.steps) > _MIN_GRADIENT:
        wrong.append("a step had no gradient")
    if max(step["max_staleness"] for step in outcome.steps):
        wrong.append("a step was trained on older weights")
    return wrong


def refusal_problems(refusal: Refusal, model: Path, outcome: Outcome) -> list[str]:
    """What is wrong with a run that should have been refused."""
    wrong = []
    if outcome.exit_code != CONFIG_EXIT:
        wrong.append(f"exit code {outcome.exit_code} instead of {CONFIG_EXIT}")
    if outcome.processes:
        wrong.append(f"started {', '.join(outcome.processes)}")
    lines = outcome.output.strip().splitlines()
    if len(lines) != 1:
        wrong.append(f"{len(lines)} lines of output instead of one")
    if not any(str(model) in line and refusal.problem in line for line in lines):
        wrong.append(f"no line names {model} and says {refusal.problem!r}")
    if wrong:
        print(outcome.output[-4000:], file=sys.stderr)
    return wrong


if __name__ == "__main__":
    main()
