"""Console settings, table [console]."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field, SecretStr, model_validator

from services.lib.http.http_config import HttpConfig


class ConsoleConfig(HttpConfig):
    """Settings of a console. It writes nothing; its death changes nothing."""

    run_id: str = ""
    """Training job that it shows; empty: that of `run_folder`."""
    http_port: int = Field(0, ge=0, le=65535)
    """Port of the pages; 0 takes a free one."""
    access_token: SecretStr | None = None
    """Secret of the link that lets a browser in; unset: one is made at each start."""
    run_folder: Path | None = None
    """Folder of the run. Its services are asked if they are up; else what they have stored there is
    read."""
    demo: bool = False
    """Show a recorded run that comes with this release."""
    trajectory_manager: str = ""
    """Address of the trajectory manager; empty, as all addresses: that of the run folder."""
    rollout_gateway: str = ""
    """Address of the rollout gateway."""
    scheduler: str = ""
    """Address of the scheduler."""
    trainer: str = ""
    """Address of the trainer."""
    weights: str = ""
    """Address of the weights service."""
    evaluator: str = ""
    """Address of the evaluator; empty: that of the run folder, or there is none."""
    model: str = ""
    """Folder whose tokenizer turns token ids into text; empty: the model of the run folder, else
    ids stand for text."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        needed = ("run_id", "rollout_gateway", "scheduler", "weights")
        missing = [name for name in needed if not getattr(self, name)]
        if self.trajectory_manager and missing:
            raise ValueError(
                f"{missing[0]} is not set, and trajectory_manager is {self.trajectory_manager!r}: "
                "give run_id and all addresses, or run_folder alone"
            )
        return self
