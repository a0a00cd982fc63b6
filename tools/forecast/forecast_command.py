"""`seamflow forecast`: memory, time and cost of a run, before anything is rented."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NoReturn

from services.chassis.errors import ConfigError, StartupError, UsageError
from services.launcher.command_line.set_option import with_file
from tools.forecast.cures import find_cures
from tools.forecast.devices import Device, device
from tools.forecast.engine_size import engine_size
from tools.forecast.report import (
    cost_lines,
    engine_lines,
    head_line,
    time_lines,
    training_lines,
)
from tools.forecast.run_shape import RunShape, read_run
from tools.forecast.step_seconds import step_seconds
from tools.forecast.training_count import TrainingCount, count_training
from trainer.algorithms.base import make_algorithm

_DESCRIPTION = """\
Say what a run needs of its devices, how long a step takes, and what it costs.

Memory is counted on the trainer's own code with tensors that have none, from the model's
config.json: no weights are needed. Seconds are work over what devices attain of their peaks.
Further arguments are those of `seamflow train`, such as --set trainer.dtype=bfloat16.
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the forecast; exit with an error code and a message for wrong settings."""
    parser = _parser()
    warnings.filterwarnings("ignore")  # of torch, on tensors that have no memory
    try:
        given, run = parser.parse_known_args(with_file(sys.argv[1:] if argv is None else argv))
        found = _priced(device(given.device), given.price)
        shape = read_run(
            ["--config", given.config, *run],
            longest=given.rollout_tokens,
            mean=given.mean_tokens,
            prompt=given.prompt_tokens,
        )
        for line in forecast(shape, found):
            print(line, flush=True)
    except StartupError as error:
        parser.exit(error.exit_code, f"{parser.prog}: {error}\n")


def forecast(shape: RunShape, found: Device) -> Iterator[str]:
    """The lines of a forecast.

    Args:
        shape: of the run.
        found: the device of all nodes.

    Raises:
        ConfigError: the model cannot be made, or a setting does not fit it.
    """
    try:
        yield from _forecast(shape, found)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _forecast(shape: RunShape, found: Device) -> Iterator[str]:
    size, longest = engine_size(shape.trainer.model), shape.lengths.longest
    yield head_line(shape, found, size)
    count = _count(shape, longest)
    cure = find_cures(shape, count, found.usable_bytes, partial(_count, tokens=longest))
    yield from training_lines(count, found, cure)
    yield from engine_lines(shape, size, found)
    mean = shape.lengths.mean
    average = cure.count if mean == longest else _count(cure.shape, mean)
    seconds = step_seconds(cure.shape, average, size, found)
    if cure.settings:
        yield f"with {', '.join(f'{name} = {value}' for name, value in cure.settings.items())}:"
    yield from time_lines(seconds)
    yield from cost_lines(seconds, cure.shape.devices, found.price)


def _count(shape: RunShape, tokens: int) -> TrainingCount:
    return count_training(
        shape.trainer,
        ranks=shape.ranks,
        rollout_tokens=tokens,
        prompt_tokens=shape.lengths.prompt,
        critic=make_algorithm(shape.trainer).critic,
    )


def _priced(found: Device, price: float | None) -> Device:
    if price is not None and price < 0:
        raise UsageError(f"--price is {price}: give dollars an hour, at least 0")
    return found if price is None else replace(found, price=price)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="seamflow forecast",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True, help="of the run; train.toml here is found")
    parser.add_argument("--device", required=True, help="such as h100-80, of every node")
    parser.add_argument("--price", type=float, help="dollars an hour for a device")
    parser.add_argument("--rollout-tokens", type=int, help="of the longest rollouts")
    parser.add_argument("--mean-tokens", type=int, help="of a rollout on average")
    parser.add_argument("--prompt-tokens", type=int, help="of them that are not sampled")
    return parser
