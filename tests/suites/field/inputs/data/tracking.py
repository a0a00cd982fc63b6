"""Names of rewards, texts of samples and groups of rewards, as files and trackers show them."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import strategies
from tensorboard.plugin_util import markdown_to_safe_html

from services.chassis.errors import ConfigError
from services.launcher.checks.run_settings import check_reward_names
from services.launcher.config import LauncherConfig
from services.tool_loop.config import ToolLoopConfig
from tests.suites.field.kind import Kind
from trainer.config import AlgorithmConfig
from trainer.data.token_sequence import TokenSequence
from trainer.leasing.accepted_samples import unknown_rewards
from trainer.tracking.step_record import MetricsFile, StepRecord, equal_groups
from trainer.tracking.tensorboard import markdown
from trainer.tracking.tracker import names

_METRICS = ("step", "loss", "grad_norm", "num_tokens", "seconds", "time", "reward_mean", "event")
_NAMES = strategies.sampled_from(_METRICS) | strategies.from_regex(
    r"[A-Za-z0-9][A-Za-z0-9._~:@+=/-]{0,20}", fullmatch=True
)
"""What the store takes as a reward's name."""


def sequence_with(rewards: Mapping[str, float], rollout_id: str = "rollout") -> TokenSequence:
    """A sequence of two tokens with these rewards."""
    zeros = np.zeros(2, np.float32)
    return TokenSequence(
        sample_id=f"{rollout_id}/0",
        rollout_id=rollout_id,
        group_id="group",
        token_ids_T=np.zeros(2, np.int32),
        behaviour_logprobs_T=zeros,
        reference_logprobs_T=zeros,
        loss_mask_T=np.array([False, True]),
        weight_versions_T=np.zeros(2, np.int64),
        temperatures_T=zeros + 1,
        rewards=rewards,
    )


def _check_names(rewards: dict[str, float]) -> None:
    """Metrics and rewards of one name both arrive, also in the history after a resume."""
    record = StepRecord(7, 0)
    record.add([sequence_with({**rewards, "trained": 0.5})])
    record.result({"loss": 2.0, "grad_norm": 3.0}, "trained")
    shown = names(record.numbers())
    right = {f"reward/{name}": value for name, value in rewards.items()}
    assert {name: shown[name] for name in right} == right
    metrics = {f"training/{name}": value for name, value in (("loss", 2.0), ("grad_norm", 3.0))}
    assert shown.items() >= metrics.items()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "metrics.jsonl")
        MetricsFile(path).append(record)
        MetricsFile(path).begin(7, {})
        (line,) = map(json.loads, path.read_text().splitlines())
    assert {name: line[name] for name in right} == pytest.approx(right, rel=1e-5)
    assert (line["step"], line["loss"], line["grad_norm"]) == (7, 2.0, 3.0)


class _Cells(HTMLParser):
    """The texts of a table's cells, as a browser shows them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        """A cell, or a new line in one; nothing else is in a table of texts."""
        assert tag in ("table", "thead", "tbody", "tr", "th", "td", "br"), tag
        if tag in ("th", "td"):
            self.found.append("")
        elif tag == "br":
            self.found[-1] += "\n"

    def handle_data(self, data: str) -> None:
        """Text of the cell; a browser takes several spaces as one, but not those of &nbsp;."""
        if self.found and data.strip("\n"):
            self.found[-1] += " ".join(data.split(" ")).replace("\xa0", " ")


def _check_text(text: str) -> None:
    """TensorBoard's own reading of the table shows each text as it is."""
    cells = _Cells()
    cells.feed(markdown_to_safe_html(markdown({"first": [text], "second": [text]})))
    lines = text.replace("\r\n", "\n").replace("\r", "\n").replace("\xa0", " ")
    assert cells.found == ["first", "second", lines, lines], cells.found


def _check_equal(rewards: list[float]) -> None:
    """As the store counts: a millionth of the greatest apart, or 1e-9, is rounding."""
    group = [sequence_with({"r": value}, f"rollout-{i}") for i, value in enumerate(rewards)]
    rounding = max(1e-6 * max(map(abs, rewards)), 1e-9)
    equal = max(rewards) - min(rewards) <= rounding
    assert equal_groups(group, "r") == {"share_equal_groups": float(equal)}


def _check_settings(case: tuple[Mapping[str, object], Mapping[str, str], bool]) -> None:
    """Names of rewards in settings are refused where the tool loop has no such reward."""
    algorithm, rewards, passes = case
    trained = AlgorithmConfig.model_validate(algorithm)
    processes = {"trainer": SimpleNamespace(algorithm=trained)}
    settings = {**processes, "tool_loop": ToolLoopConfig.model_validate({"rewards": rewards})}
    own = {"name": "run", "model": "m", "environment": "tool_loop", "tasks": "t.jsonl"}
    config = LauncherConfig.model_validate(own)
    told = unknown_rewards({"algorithm.reward_weights": trained.reward_weights}, [*rewards])
    try:
        check_reward_names(config, cast(Any, settings))
    except ConfigError:
        assert not passes
    else:
        assert passes
        assert not told or any(":" in how for how in rewards.values())


_TEXTS = strategies.text(strategies.characters(exclude_categories=["Cs", "Cc"])) | strategies.text(
    "*_`[]()#+-.!|<>&~^$\n\r\t \\1a:/=\"'"
)
_SMALL = strategies.floats(-10, 10)


@strategies.composite
def _group(draw: strategies.DrawFn) -> list[float]:
    """One number as sums and in float32, maybe beside one that is another."""
    value = draw(_SMALL)
    same = [value, float(np.float32(value)), math.nextafter(value, math.inf), value + 0.1 - 0.1]
    return draw(strategies.permutations(same)) + draw(strategies.lists(_SMALL, max_size=1))


_TWO = {"correct": "math", "format": "regex:^x"}

KINDS = (
    Kind(
        name="rewards in settings",
        check=_check_settings,
        examples=[
            ({"reward_weights": {"correct": 1.0, "fromat": 1.0}}, _TWO, False),
            ({"reward_weights": {"correct": 1.0, "format": 1.0}}, _TWO, True),
            ({"reward": "success"}, _TWO, False),
            ({"reward": "format"}, _TWO, True),
            ({}, _TWO, False),
            ({}, {"anything": "exact"}, True),
            ({"reward_weights": {"other": 1.0}}, {"own": "my_module:reward"}, True),
        ],
    ),
    Kind(
        name="names of rewards",
        check=_check_names,
        examples=[dict.fromkeys(_METRICS, 0.25), {"acc@1": 1.0, "acc_1": 0.5, "a//b": 0.0}],
        generated=strategies.dictionaries(_NAMES, strategies.floats(0.125, 8, width=16)),
        short=30,
    ),
    Kind(
        name="texts in TensorBoard",
        check=_check_text,
        examples=[
            "2*3*4", r"\[x\]", "__init__", "a|b", "<b>&amp;", "# x\n\n    code", "- a  b", "|---|",
            "[a](b)", "http://a.b", "```\nx\n```", "", " ", "$x_1$", "a\r\nb", "&#42;",
        ],
        generated=_TEXTS,
        short=50,
    ),
    Kind(
        name="shares of equal groups",
        check=_check_equal,
        examples=[[0.1 + 0.2, 0.3], [1.0, 0.99999994], [0.0, 1e-6], [1.0, 0.999], [1.0]],
        generated=_group(),
        short=50,
    ),
)  # fmt: skip
