"""Live view of a run in the terminal."""

from __future__ import annotations

import asyncio
import textwrap
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text
from seamflow.inspect.lives import lives
from seamflow.inspect.progress import seconds_left
from seamflow.inspect.run_files import GrowingSteps
from seamflow.inspect.snapshot import Snapshot
from seamflow.inspect.status_screen import left_text, status_lines

from services.chassis.log import get_logger

_BARS = "▁▂▃▄▅▆▇█"


class View:
    """Shows the progress of a run: a line per phase and per optimizer step, for logs and pipes."""

    def __init__(self, metrics_file: Path | None = None) -> None:
        self._steps = GrowingSteps(metrics_file) if metrics_file is not None else None
        self._lives = [] if metrics_file is None else lives(metrics_file.parent)
        self._start = time.monotonic()
        self._step = 0

    def phase(self, text: str) -> None:
        print(f"[{time.monotonic() - self._start:6.1f} s] {text}", flush=True)

    def note(self, text: str) -> None:
        print(_indented(text), flush=True)

    async def repeat(self, what: str, act: Callable[[], Awaitable[None]], seconds: float) -> None:
        """Call `act` every `seconds` until cancelled; an error that repeats is shown once."""
        told = set[str]()
        while True:
            try:
                await act()
            except Exception as error:  # whatever it is, the next call may show an alarm
                if (text := f"{type(error).__name__}: {error}") not in told:
                    told.add(text)
                    get_logger().exception("watching_failed", what=what)
                    self.note(f"{what} failed, and is repeated: {text}")
            await asyncio.sleep(seconds)

    def progress(self, done: int, total: int) -> None:
        """Nothing: there is no bar."""

    def show(self, snapshot: Snapshot) -> None:
        """Print the newest optimizer step, with its mean reward, if it is another one."""
        trainer = snapshot.trainer
        if trainer is None or trainer.step <= self._step or self._steps is None:
            return
        steps = self._steps.read()
        if steps and steps[-1]["step"] >= trainer.step:
            self._step = steps[-1]["step"]
            reward = f"mean reward {steps[-1]['reward_mean']:.3f}"
            left = self._left(steps, trainer.num_steps)
            self.note(f"step {self._step} of {trainer.num_steps}: {reward}{left}")

    def _left(self, steps: Sequence[dict[str, Any]], num_steps: int) -> str:
        """Of training; the lives are those at the start, all stops among them."""
        return left_text(seconds_left(steps, num_steps, self._lives))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        return None


class LiveView(View):
    """A panel that is redrawn periodically: bar, reward, throughput, versions, nodes."""

    def __init__(self, title: str, metrics_file: Path) -> None:
        super().__init__(metrics_file)
        self._title, self._metrics = title, GrowingSteps(metrics_file)
        self._facts: Snapshot | None = None
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=40),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}"),
        )
        self._task = self._bar.add_task("", total=None, left="")
        self._live = Live(console=Console(), refresh_per_second=4, get_renderable=self.renderable)

    def phase(self, text: str) -> None:
        self._live.console.print(f"[dim]{time.monotonic() - self._start:6.1f} s[/]  {text}")
        self._bar.reset(self._task, total=None, description=text, left="")

    def note(self, text: str) -> None:
        """Print the text above the panel, indented and ready to be copied."""
        self._live.console.print(_indented(text), soft_wrap=True, markup=False, highlight=False)

    def progress(self, done: int, total: int) -> None:
        left = self._left(self._metrics.read(), total).removeprefix(", ")
        self._bar.update(self._task, completed=done, total=total, left=left)

    def show(self, snapshot: Snapshot) -> None:
        self._facts = snapshot

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def renderable(self) -> Panel:
        elapsed = f"{time.monotonic() - self._start:.0f} s"
        parts = [self._bar, *([] if self._facts is None else self._body(self._facts))]
        return Panel(Group(*parts), title=f"seamflow · {self._title}", subtitle=elapsed)

    def _body(self, snapshot: Snapshot) -> list[Any]:
        lines = Text("\n".join(status_lines(snapshot)), no_wrap=True, overflow="ellipsis")
        return [_curve(self._metrics.read()), lines]


def _indented(text: str) -> str:
    return textwrap.indent(text, " " * 11)


def _curve(steps: Sequence[dict[str, Any]]) -> Text:
    if not steps:
        return Text("no optimizer step yet", style="dim")
    rewards = [step["reward_mean"] for step in steps]
    text = Text(f"reward   {rewards[-1]:6.3f}  ")
    return text.append(_sparkline(rewards[-60:]), style="green")


def _sparkline(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in values)
