"""Packages of chosen options, ports, and fields of tasks, checked before a process starts."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollout.http_gateway.config import HttpGatewayConfig
from services.chassis.config.settings import ServerConfig
from services.chassis.errors import ConfigError
from services.dataloader.config import DataloaderConfig
from services.launcher.checks.prerequisites import check_chosen, check_ports
from services.launcher.checks.user_code import with_task_fields
from services.launcher.child_process import ProcessPlan
from services.launcher.cli import make_layout
from services.ranker.config import LanguageModelConfig, RankerConfig
from services.tool_loop.config import ToolLoopConfig
from tests.lib.launcher.support import make_config
from trainer.config import TrainerConfig


def _trainer(**settings: Any) -> ServerConfig:
    given = {"run_id": "r", "model": "/m", "checkpoint": {"folder": "/x"}, **settings}
    return TrainerConfig.model_validate(given)


THERE = "seamflow.installation._is_installed"


@pytest.mark.parametrize(
    ("made", "line"),
    [
        (
            lambda: _trainer(lora={"rank": 8}),
            r"trainer\.lora\.rank = 8 needs .*\(peft\): pip install 'seamflow\[lora\]'",
        ),
        (
            lambda: _trainer(tracking={"trackers": ["wandb"]}),
            r"'wandb' in trainer\.tracking\.trackers needs .*'seamflow\[wandb\]'",
        ),
        (
            lambda: _trainer(checkpoint={"folder": "/x", "store": "s3://b/x"}),
            r"trainer\.checkpoint\.store = 's3://b/x' needs .*'seamflow\[object-store\]'",
        ),
        (
            lambda: DataloaderConfig(run_id="r", tasks="hf://gsm8k"),
            r"tasks = 'hf://gsm8k' needs .*'seamflow\[datasets\]'",
        ),
        (
            lambda: RankerConfig(
                run_id="r", kind="language_model", language_model=LanguageModelConfig(model="/m")
            ),
            r"ranker\.kind .* needs .*'seamflow\[ranker-language-model\]'",
        ),
        (
            lambda: ServerConfig(otlp_endpoint="http://127.0.0.1:4318"),
            r"otlp_endpoint of one needs .*'seamflow\[otel\]'",
        ),
    ],
)
def test_an_option_without_its_package_is_one_line(
    monkeypatch: pytest.MonkeyPatch, made: Callable[[], ServerConfig], line: str
) -> None:
    """With the extra that has it; what is not chosen needs nothing."""
    monkeypatch.setattr(THERE, lambda name: False)
    with pytest.raises(ConfigError, match=f"^{line}$"):
        check_chosen({"one": made()})
    check_chosen({"one": _trainer(), "two": ServerConfig()})
    monkeypatch.setattr(THERE, lambda name: True)
    check_chosen({"one": made()})


def test_a_taken_port_is_told_with_process_setting_and_cure() -> None:
    """All of them at once; a free one, and one that the system chooses, are none."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        settings = {"trainer": ServerConfig(port=port), "weights": ServerConfig(admin_port=port)}
        taken = rf"^port of trainer is {port}, and that port is taken: give another, or 0 .*\n"
        with pytest.raises(ConfigError, match=rf"{taken}admin_port of weights is {port}, and so"):
            check_ports(settings)
    check_ports({"trainer": settings["trainer"], "scheduler": ServerConfig(admin_port=-1)})


def test_trainers_and_http_gateways_share_their_ports() -> None:
    """One rank of a trainer listens at a time; *control*: each node agent does."""
    gateway = HttpGatewayConfig(run_id="r", http_port=20_001, share_port=True)
    shared = {f"http_gateway-{i}": gateway for i in range(2)}
    trainers = {f"trainer-{node}": ServerConfig(port=20_002) for node in "ab"}
    check_ports({**shared, **trainers})
    with pytest.raises(ConfigError, match="admin_port of node_agent-b is 20003, and so is adm"):
        check_ports({f"node_agent-{node}": ServerConfig(admin_port=20_003) for node in "ab"})


def _planned(name: str) -> ProcessPlan:
    return ProcessPlan(name=name, command=("true",), environment={"A": "b"}, settings=())


@pytest.mark.parametrize(
    ("loop", "fields"),
    [
        ({"prompt": "{question} {hint} {question}"}, '["own", "question", "hint"]'),
        ({"rewards": {"r": "exact"}, "answer_field": "right"}, '["own", "question", "right"]'),
        ({"rewards": {"r": "regex:x"}}, '["own", "question"]'),
    ],
)
def test_rows_need_what_the_tool_loop_names(loop: dict[str, Any], fields: str) -> None:
    """Beside what the user requires; without a tool loop nothing is changed."""
    plans = {name: _planned(name) for name in ("tool_loop-0", "dataloader")}
    loader = DataloaderConfig(run_id="r", tasks="t.jsonl", required_fields=("own",))
    settings: dict[str, ServerConfig] = {"dataloader": loader}
    assert with_task_fields(plans, settings) == plans
    settings["tool_loop-0"] = ToolLoopConfig(**loop)
    changed = with_task_fields(plans, settings)
    assert changed["tool_loop-0"] == plans["tool_loop-0"]
    given = {"A": "b", "SEAMFLOW_DATALOADER_REQUIRED_FIELDS": fields}
    assert changed["dataloader"].environment == given


def test_a_run_that_cannot_have_its_port_leaves_its_name_free(tmp_path: Path) -> None:
    """And a wrong name to resume is told with the one that was meant."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        config = make_config(runs_folder=str(tmp_path), console_port=port)
        with pytest.raises(ConfigError, match=f"console_port is {port}: that port is taken"):
            make_layout(config, tmp_path / "run.toml")
    assert list(tmp_path.iterdir()) == []
    assert make_layout(config, tmp_path / "run.toml").folder == tmp_path / "run"
    (tmp_path / "run" / "began_with.json").touch()
    other = make_config(name="rnu", runs_folder=str(tmp_path), resume=True)
    with pytest.raises(ConfigError, match=r"no run 'rnu' in .* to --resume; did you mean run\?"):
        make_layout(other, tmp_path / "run.toml")
