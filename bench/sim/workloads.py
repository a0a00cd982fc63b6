"""What the emulated agents do, drawn from `workloads.toml`: a pure function of the seed."""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, Self

_FILE = Path(__file__).with_name("workloads.toml")


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnPlan:
    """One turn of a rollout."""

    new_tokens: int
    """Tokens of the prompt or of the environment that come before it."""
    output_tokens: int
    tool_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPlan:
    """What one agent does from beginning to end."""

    turns: tuple[TurnPlan, ...]

    @property
    def tokens(self) -> int:
        """All tokens, those of the environment too: what a trainer computes."""
        return sum(turn.new_tokens + turn.output_tokens for turn in self.turns)

    @property
    def output_tokens(self) -> int:
        """Tokens to sample."""
        return sum(turn.output_tokens for turn in self.turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogNormal:
    """A truncated lognormal, part of whose variance the rollouts of one group share."""

    median: float
    """Of the distribution before it is cut."""
    sigma: float
    most: float
    """Greater ones are cut to this."""
    prompt_share: float
    """Share of the variance that a group has in common."""

    def draw(self, common: float, random: Random) -> float:
        """`common` is the group's own standard normal number."""
        own = random.gauss(0.0, 1.0)
        normal = math.sqrt(self.prompt_share) * common + math.sqrt(1 - self.prompt_share) * own
        return min(self.median * math.exp(self.sigma * normal), self.most)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A kind of agent, and the steps it is trained in."""

    name: str
    least_turns: int
    """Of a rollout."""
    most_turns: int
    """Of a rollout; each number in between is as likely."""
    prompt_tokens: int
    """Before the first turn."""
    output_tokens: LogNormal
    """Of a turn."""
    tool_tokens: int
    """Before each later turn."""
    tool_seconds: LogNormal
    """After each turn but the last."""
    most_context: int
    """A rollout ends before it grows beyond this."""
    group_size: int
    """Rollouts of one task."""
    groups_per_step: int
    slots: int
    """Sequences that an engine decodes at once."""
    rollouts_per_node: int
    """Rollouts under way for each serving node: more than slots where tools take time."""
    max_staleness: int
    """Bound, in weight versions."""

    @property
    def rollouts_per_step(self) -> int:
        """Of an optimizer step."""
        return self.groups_per_step * self.group_size

    def group(self, seed: int, number: int) -> list[RolloutPlan]:
        """The rollouts of group `number`."""
        random = Random(f"{seed}:{self.name}:{number}")
        common, turns = random.gauss(0.0, 1.0), random.randint(self.least_turns, self.most_turns)
        return [self._rollout(random, common, turns) for _ in range(self.group_size)]

    def scaled(self, scale: float) -> Self:
        """The same agents, whose outputs are `scale` times as long."""
        output = self.output_tokens
        return replace(
            self,
            name=f"{self.name}_x{scale:g}",
            output_tokens=replace(output, median=output.median * scale, most=output.most * scale),
            most_context=round(self.most_context * max(scale, 1.0)),
        )

    def _rollout(self, random: Random, common: float, most_turns: int) -> RolloutPlan:
        turns: list[TurnPlan] = []
        context = 0
        for number in range(most_turns):
            new = self.tool_tokens if number else self.prompt_tokens
            output = max(1, round(self.output_tokens.draw(common, random)))
            if turns and context + new + output > self.most_context:
                break
            context += new + output
            seconds = self.tool_seconds.draw(common, random) if number + 1 < most_turns else 0.0
            turns.append(TurnPlan(new_tokens=new, output_tokens=output, tool_seconds=seconds))
        return RolloutPlan(turns=tuple(turns))


def load_workloads(file: Path = _FILE) -> dict[str, Workload]:
    """All workloads by name."""
    tables = tomllib.loads(file.read_text())
    return {name: _workload(name, table) for name, table in tables.items()}


def _workload(name: str, table: dict[str, Any]) -> Workload:
    turns = table.pop("turns")
    output, tool = (LogNormal(**table.pop(key)) for key in ("output_tokens", "tool_seconds"))
    return Workload(
        name=name,
        least_turns=turns["least"],
        most_turns=turns["most"],
        output_tokens=output,
        tool_seconds=tool,
        **table,
    )
