"""Every extra brings what its process needs, and without any an agent has all that it needs."""

from __future__ import annotations

import compileall
import shutil
import subprocess
from pathlib import Path

import pytest

from services.launcher.checks.prerequisites import extra_of
from services.launcher.checks.run_settings import CLASSES
from tests.lib.mostly_long import mostly_long
from tests.system.wheel.only_packages import link_packages, names_of, run_with

OPTIONAL = "peft,tensorboard,wandb,mlflow,datasets,opentelemetry"
"""What the extras beside a process bring; settings ask for it, and say so where it is missing."""
TORCH = ("-rollout.server.engines.torch",)
SGLANG = "-rollout.server.engines.sglang"
WITHOUT_TOKENIZER = (
    "-services.lib.rendering",
    "-services.lib.model_files.json_file",
    "-services.lib.model_files.tokenizer_files",
)
"""What a server in front of SGLang imports and never calls, and what asks transformers if it is
there."""
LANGUAGE_MODEL = ("-services.ranker.language_model", "-services.ranker.prompt_encoder")
"""What a ranker of the kind hashed never imports."""
TRACKERS = ("-trainer.tracking.mlflow", "-trainer.tracking.wandb", "-trainer.tracking.tensorboard")
PROCESSES = {
    "trajectory-manager": ("trajectory_manager",),
    "rollout-gateway": ("rollout.gateway",),
    "http-gateway": ("rollout.http_gateway",),
    "rollout-server": ("rollout.server", SGLANG),
    "sglang": ("rollout.server", *TORCH, *WITHOUT_TOKENIZER),
    "scheduler": ("scheduler",),
    "trainer": ("trainer", "tools.backup", *TRACKERS),
    "weights": ("services.weights",),
    "node-agent": ("services.node_agent",),
    "dataloader": ("services.dataloader",),
    "ranker": ("services.ranker", *LANGUAGE_MODEL),
    "ranker-language-model": ("services.ranker",),
    "evaluator": ("services.evaluator",),
    "scoring": ("services.scoring",),
    "environments": ("services.environments",),
    "tool-loop": ("services.tool_loop",),
    "console": ("services.console",),
    "launcher": ("services.launcher",),
    "quickstart": ("tools.plan",),
}
"""Packages of each process, by its extra."""
IN_SHORT = {"trajectory-manager", "http-gateway", "trainer", "tool-loop", "console", "launcher"}
"""Of processes that share the packages of their extras, one."""


@pytest.fixture(scope="session")
def compiled(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site with byte code, as an installer leaves it; each process would compile it again."""
    folder = tmp_path_factory.mktemp("compiled") / "site"
    shutil.copytree(site, folder)
    assert compileall.compile_dir(folder, quiet=2)
    return folder


def imported(
    site: Path, folder: Path, extra: str | None, *packages: str
) -> subprocess.CompletedProcess[str]:
    """Import them where the wheel is installed with this extra, and nothing else is."""
    names = names_of(site, *([] if extra is None else [extra]))
    link_packages(folder / "only", names)
    program = str(Path(__file__).with_name("import_all.py"))
    sites = (site, site / "seamflow" / "_services", folder / "only")
    return run_with(sites, program, OPTIONAL, *packages, cwd=folder)


@pytest.mark.parametrize("extra", mostly_long(PROCESSES, *IN_SHORT, short=__file__))
def test_an_extra_brings_all_that_its_process_imports(
    compiled: Path, tmp_path: Path, extra: str
) -> None:
    """At its start and later: every import in the text of its modules, too."""
    done = imported(compiled, tmp_path, extra, *PROCESSES[extra])
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_an_extra_without_a_package_is_noticed(compiled: Path, tmp_path: Path) -> None:
    """Negative controls: at the start, and in a function."""
    done = imported(compiled, tmp_path / "1", "chassis", "services.weights")
    assert "No module named 'xxhash'" in done.stderr
    done = imported(compiled, tmp_path / "2", "weights", "services.lib.rendering.renderer")
    assert "jinja2 of services.lib.rendering" in done.stdout + done.stderr


def test_every_process_of_a_run_has_an_extra() -> None:
    """By the name of its table, which is how the launcher finds it."""
    assert {extra_of(table, "torch") for table in CLASSES} | {
        "sglang",
        "launcher",
        "quickstart",
        "ranker-language-model",
    } == set(PROCESSES)
    assert extra_of("rollout_server", "sglang") == "sglang"
    assert extra_of("rollout_server", "my_engine:Engine") == "chassis"


def test_an_agent_installs_grpcio_and_protobuf(compiled: Path, tmp_path: Path) -> None:
    """The wheel has more code than it imports; the packages are those two and what grpcio needs."""
    assert names_of(compiled) == {"grpcio", "protobuf", "typing-extensions"}
    done = imported(compiled, tmp_path, None, "seamflow", "-seamflow._services")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
