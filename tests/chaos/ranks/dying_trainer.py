"""A trainer whose ranks die by SIGKILL halfway through a backward pass, as deaths.json says.

Beside the checkpoint folder each rank leaves `ranks.jsonl`: the start of each of its processes, its
death, process groups that were formed and steps that were done.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from trainer.cli import main
from trainer.commands import Accumulate, Command, Form, Optimize
from trainer.ranks import worker

_carry_out, _begin = worker.Worker.do, worker.Worker.__init__
_RANK = int(os.environ.get("RANK", "0"))
_optimized = {"step": 0}


def begin(self: worker.Worker, config: Any, *arguments: Any, **others: Any) -> None:
    """Note the process."""
    _begin(self, config, *arguments, **others)
    note(self, "began", pid=os.getpid())


def carry_out(self: worker.Worker, command: Command) -> dict[str, float]:
    """Note what the gang does; die if that is due."""
    if isinstance(command, Accumulate) and _is_due(self):
        _die_in_backward(self)
    results = _carry_out(self, command)
    if isinstance(command, Form):
        note(self, "formed", num_ranks=len(command.members))
    if isinstance(command, Optimize):
        _optimized["step"] = command.step
        note(self, "optimized", step=command.step)
    return results


def note(self: worker.Worker, event: str, **values: Any) -> None:
    """A line; written at once, as the process may end."""
    line = {"event": event, "rank": _RANK, "time": time.time(), **values}
    with (_folder(self) / "ranks.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def _is_due(self: worker.Worker) -> bool:
    """Whether this rank dies in the step in progress, and has not before."""
    deaths = json.loads((_folder(self) / "deaths.json").read_text())
    due = [_optimized["step"] + 1, _RANK] in deaths
    return due and not _mark(self).exists()


def _die_in_backward(self: worker.Worker) -> None:
    def die(*_: Any) -> None:
        _mark(self).touch()
        note(self, "died", step=_optimized["step"] + 1)
        os.kill(os.getpid(), signal.SIGKILL)

    layer = self._policy.backend._model.base_model.layers[0]  # type: ignore[attr-defined]
    layer.register_full_backward_hook(die)


def _mark(self: worker.Worker) -> Path:
    return _folder(self) / f"died_{_optimized['step'] + 1}_{_RANK}"


def _folder(self: worker.Worker) -> Path:
    return self._config.checkpoint.folder.parent


if __name__ == "__main__":
    worker.Worker.__init__, worker.Worker.do = begin, carry_out  # type: ignore[method-assign]
    main()
