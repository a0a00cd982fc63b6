"""`make test-agents`: agents on the official SDKs of OpenAI and Anthropic, in Python and Node.

Four parts. `sdks`: chat, Responses, Messages, streams, tools, errors and retries against a served
run with the torch engine. `equal_calls`: 500 parallel calls of one content, above a limit,
and 100 repeated ones. `training`: a run in which all samples come from an agent on the openai
SDK. `kills`: the same with four forms of calls, while rollout servers, rollout gateway and HTTP
gateways are killed; then, as a control, with HTTP gateways that take a repeated call for a new one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.report import Report
from tests.suites.agents.agent_run import CONFIG_FILE, AgentRun, Outcome, make_run
from tests.suites.agents.equal_calls import figures
from tests.suites.agents.served import served
from tools.provenance import ROOT

PARTS = ("sdks", "equal_calls", "training", "kills")
VICTIMS = (
    "rollout_server-node-a",
    "rollout_gateway",
    "rollout_server-node-b",
    "http_gateway-0",
    "rollout_server-node-a",
    "rollout_gateway",
    "rollout_server-node-b",
    "http_gateway-1",
)
NUM_KILLS = 20
NUM_EQUAL, NUM_REPEATED = 500, 100
NUM_CONTROL_KILLS = 8
FORMS = ("chat", "chat_stream", "responses", "messages")
NODE = ROOT / "tests" / "suites" / "agents" / "node" / "sdk_checks.mjs"
PACKAGES = ("seamflow", "openai", "anthropic", "aiohttp", "torch", "transformers", "grpcio")


def main() -> None:
    """Run the parts and report."""
    parser = argparse.ArgumentParser(prog="tests.suites.agents", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--folder", type=Path, help="keep logs and records here")
    options = parser.parse_args()
    found_figures: dict[str, float] = {}
    raw: dict[str, Sequence[float]] = {}
    problems: list[str] = []
    with tempfile.TemporaryDirectory(prefix="seamflow-agents-") as scratch:
        folder = (options.folder or Path(scratch)).resolve()
        prepared = _prepare(folder / "prepared", options.seed)
        for part in options.only:
            found = _PARTS[part](folder / part, prepared, options.seed)
            found_figures |= {f"{part}.{name}": value for name, value in found.figures.items()}
            raw |= {f"{part}.reward_mean": found.rewards} if found.rewards else {}
            problems += [f"{part}: {each}" for each in found.problems]
    report = Report(
        bench="agents", figures=found_figures, raw=raw, seeds=[options.seed], packages=PACKAGES
    )
    if set(options.only) == set(PARTS):
        report.publish()
    else:
        report.show()
    if problems:
        sys.exit("; ".join(problems))


def _sdks(folder: Path, prepared: Path, seed: int) -> Outcome:
    """The checks of both languages against a served run."""
    with served(CONFIG_FILE, folder, "served", prepared, seed) as addresses:
        url = addresses["http_gateway"]
        said = {
            "python": _last_line([sys.executable, "-m", "tests.suites.agents.sdk_checks", url]),
            "node": _last_line(["node", str(NODE), url]),
        }
    figures = {f"checks_{name}": each["checks"] for name, each in said.items()}
    figures["checks_failed"] = sum(len(each["failed"]) for each in said.values())
    failed = [f"{name} {each}" for name, all_ in said.items() for each in all_["failed"]]
    return Outcome(figures, [], [], problems=failed)


def _equal_calls(folder: Path, prepared: Path, seed: int) -> Outcome:
    """Each call is a sample of its own, and each repeated one gets the turn that it had begun."""
    found = asyncio.run(figures(NUM_EQUAL, NUM_REPEATED))
    outcome = Outcome(found, [], [])
    if found["different_samples"] < NUM_EQUAL or found["copies"] or found["not_received"]:
        outcome.problems.append("equal calls share samples")
    if found["repeated_right"] < NUM_REPEATED:
        outcome.problems.append("repeated calls got other turns")
    return outcome


def _training(folder: Path, prepared: Path, seed: int) -> Outcome:
    """All samples come from an agent on the openai SDK."""
    run = _run(folder, prepared, seed, forms=("chat", "chat_stream"))
    outcome = _trained(run)
    if outcome.figures["optimizer_steps"] < 10:
        outcome.problems.append("fewer than 10 optimizer steps")
    if outcome.figures["heldout_after"] <= outcome.figures["heldout_before"]:
        outcome.problems.append("success did not rise")
    return outcome


def _kills(folder: Path, prepared: Path, seed: int) -> Outcome:
    """Every call of every SDK is answered; with repeated calls as new ones turns are left over."""
    victims = [VICTIMS[i % len(VICTIMS)] for i in range(NUM_KILLS)]
    outcome = _trained(_run(folder / "kills", prepared, seed, forms=FORMS, victims=victims))
    if not outcome.figures["calls_repeated_by_sdks"]:
        outcome.problems.append("no SDK has repeated a call")
    control = _trained(
        _run(
            folder / "control",
            prepared,
            seed,
            forms=FORMS,
            victims=[f"http_gateway-{i % 2}" for i in range(NUM_CONTROL_KILLS)],
            http_gateway="tests.suites.agents.no_turn_matching",
            num_steps=NUM_CONTROL_KILLS + 2,
            heldout_tasks=None,
        )
    )
    outcome.figures |= {
        "control_turns_not_received": control.figures["turns_not_received"],
        "controls_noticed": float(bool(control.problems)),
    }
    if not control.problems:
        outcome.problems.append("the control without matched turns found nothing")
    return outcome


_PARTS = {"sdks": _sdks, "equal_calls": _equal_calls, "training": _training, "kills": _kills}


def _prepare(folder: Path, seed: int) -> Path:
    """Model and tasks of all runs."""
    if not folder.exists():
        command = ["examples.quickstart.prepare_tools", "--out", str(folder), "--seed", str(seed)]
        subprocess.run([sys.executable, "-m", *command], check=True)
        (folder / ".complete").touch()
    return folder


def _run(folder: Path, prepared: Path, seed: int, **options: Any) -> AgentRun:
    shutil.copytree(prepared, folder / "prepared")
    return make_run(folder, seed=seed, **options)


def _trained(run: AgentRun) -> Outcome:
    asyncio.run(run.train())
    assert run.outcome is not None
    return run.outcome


def _last_line(command: Sequence[str]) -> dict[str, Any]:
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


if __name__ == "__main__":
    main()
