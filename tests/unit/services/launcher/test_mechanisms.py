"""What a summary counts of the mechanisms that acted."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from seamflow.scheduler.v1 import scheduler_service_pb2 as pb

from services.launcher.report.mechanisms import NodeMoves, of_processes, of_steps, ports_file


def event(
    sequence: int, tag: str, *, lent: bool = False, taken_up: bool = True, kind: str = "reported"
) -> pb.AllocationEvent:
    """The node after it was assigned `tag` under the epoch `sequence`."""
    return pb.AllocationEvent(
        sequence=sequence,
        kind=kind,
        node=pb.Node(
            node_id="node-b",
            assignment=pb.Assignment(tag=tag, epoch=sequence, lent=lent),
            reported_epoch=sequence if taken_up else sequence - 1,
            state=pb.NODE_STATE_ACTIVE,
        ),
    )


def counted(*events: pb.AllocationEvent) -> NodeMoves:
    """The counts of these events."""
    moves = NodeMoves()
    for each in events:
        moves.add(each)
    return moves


def test_lendings_and_returns_count_when_the_epoch_is_reported() -> None:
    """An assignment that was not taken up is no lending, and no switch."""
    moves = counted(
        event(1, "rollout", lent=True, taken_up=False),
        event(2, "rollout", lent=True),
        event(3, "train", taken_up=False),
        event(4, "train"),
        event(5, "rollout", lent=True),
    )
    assert (moves.num_lent, moves.num_returned) == (2, 1)
    assert moves.switches == {"rollout": 2, "train": 1}
    moves.add(event(6, ""))
    assert (moves.num_lent, moves.num_returned) == (2, 2)


def test_a_node_that_reports_again_has_not_switched_again() -> None:
    """Each epoch counts once."""
    moves = counted(event(1, "train"), event(1, "train"))
    assert moves.switches == {"train": 1}


def test_decisions_about_gangs_count_without_a_node() -> None:
    """The newest sequence number is kept, after which a broken stream continues."""
    moves = counted(
        *(pb.AllocationEvent(sequence=n, kind=kind) for n, kind in ((7, "tail"), (8, "resized")))
    )
    assert (moves.num_tails, moves.num_resizes, moves.sequence) == (1, 1, 8)


def test_steps_that_began_early_are_those_with_groups_missing() -> None:
    """A line of an older version, without the number at the start, counts as whole."""
    steps = [
        {"num_groups": 4, "num_groups_at_start": 1, "tasks_interleaved": 3},
        {"num_groups": 4, "num_groups_at_start": 4},
        {"num_groups": 4},
    ]
    assert of_steps(steps) == {"steps_begun_early": 1, "tasks_interleaved": 3}


class _Metrics(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        """Two samples of one counter."""
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"# TYPE seamflow_scoring_samples counter\n")
        for label in "ab":
            self.wfile.write(b'seamflow_scoring_samples_total{x="%s"} 3.0\n' % label.encode())

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture
def port() -> Iterator[int]:
    """Of a process that answers."""
    server = HTTPServer(("127.0.0.1", 0), _Metrics)
    threading.Thread(target=server.serve_forever).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


async def test_counters_are_summed_over_the_processes_that_answer(
    port: int, tmp_path: Path
) -> None:
    """One that has ended, or never said its port, counts nothing."""
    for name, text in {
        "scoring-a": json.dumps({"admin_port": port}),
        "scoring-b": json.dumps({"admin_port": port}),
        "ended": json.dumps({"admin_port": 1}),
        "none": json.dumps({"admin_port": -1}),
        "broken": "{",
    }.items():
        ports_file(tmp_path, name).write_text(text)
    found = await of_processes(tmp_path)
    assert found["samples_scored"] == 12
    assert found["weight_bytes_relayed"] == 0
