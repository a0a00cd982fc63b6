"""`make test-frameworks`: unmodified agents of six frameworks, through the real system.

Each has two tools and one structured answer, and runs in an environment of its own. The policy is
small: it is taught the recorded requests of these agents, then served by the torch engine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from seamflow import Client

from bench.report import Report
from tests.suites.agents.frameworks.installed import AGENTS, run_agent, versions_of
from tests.suites.agents.frameworks.policy import make_policy
from tests.suites.agents.frameworks.replay import num_with_answers, recorded_requests
from tests.suites.agents.served import served

CONFIG_FILE = Path(__file__).with_name("frameworks.toml")
RUN = "frameworks"
EXPECTED = {"total": 5, "weather": "sunny in Ulm"}
PACKAGES = ("seamflow", "aiohttp", "torch", "transformers", "grpcio")


def main() -> None:
    """Teach the policy, run the agents, report."""
    parser = argparse.ArgumentParser(prog="tests.suites.agents.frameworks", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=AGENTS, default=AGENTS)
    parser.add_argument("--model", type=Path, help="a policy that was made before")
    options = parser.parse_args()
    problems: list[str] = []
    with tempfile.TemporaryDirectory(prefix="seamflow-frameworks-") as scratch:
        folder = Path(scratch)
        figures = _prepare(folder / "prepared", options.model, options.seed)
        with served(CONFIG_FILE, folder, RUN, folder / "prepared", options.seed) as addresses:
            for name in options.only:
                figures |= _figures(name, addresses, problems)
    totals = ("ended", "turns", "turns_with_answers", "turns_continued")
    sums = {key: sum(v for k, v in figures.items() if k.endswith(f".{key}")) for key in totals}
    report = Report(
        bench="frameworks",
        figures={"agents": len(options.only), **sums, **figures},
        seeds=[options.seed],
        packages=PACKAGES,
        peers={name: versions_of(name) for name in options.only},
    )
    report.publish() if tuple(options.only) == AGENTS else report.show()
    if problems:
        sys.exit("; ".join(problems))


def _prepare(folder: Path, model: Path | None, seed: int) -> dict[str, float]:
    (folder / "model").mkdir(parents=True)
    task = {"task_id": "none", "payload": {}}
    (folder / "tasks.jsonl").write_text(json.dumps(task) + "\n")
    if model is None:
        return make_policy(folder / "model", seed)
    shutil.copytree(model, folder / "model", dirs_exist_ok=True)
    return {}


def _figures(name: str, addresses: Mapping[str, str], problems: list[str]) -> dict[str, float]:
    """Run one agent in a rollout of its own."""
    rollout = _post(f"{addresses['http_gateway']}/rollouts")
    try:
        found = run_agent(name, rollout["base_url"], rollout["credential"])
    except (RuntimeError, ValueError, LookupError) as error:
        problems.append(f"{name}: {error}")
        found = {}
    if found.get("report") != EXPECTED:
        problems.append(f"{name} reports {found.get('report')}")
    turns = asyncio.run(_turns(addresses["rollout_gateway"], rollout))
    continued = sum(turn.prefix_length > 0 for turn in turns)
    expected = num_with_answers(recorded_requests(name))
    if continued != expected:
        problems.append(f"{name} continues {continued} turns of {expected}")
    return {
        f"{name}.ended": float(found.get("report") == EXPECTED),
        f"{name}.turns": len(turns),
        f"{name}.turns_with_answers": expected,
        f"{name}.turns_continued": continued,
    }


async def _turns(gateway: str, rollout: Mapping[str, Any]) -> Sequence[Any]:
    async with Client(gateway, run_id=RUN) as client:
        record = await client.rollout(rollout["rollout_id"], rollout["credential"]).trajectory()
    return record.turns


def _post(url: str) -> dict[str, Any]:
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(url, b"{}", headers)
    with urllib.request.urlopen(request, timeout=60.0) as reply:
        answer: dict[str, Any] = json.load(reply)
    return answer


if __name__ == "__main__":
    main()
