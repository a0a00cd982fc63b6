"""A gateway in front of real rollout servers, one of which is broken."""

from __future__ import annotations

import json
from pathlib import Path

import grpc.aio
import pytest
from seamflow.errors import InvalidRequestError, PreconditionError, SeamflowError, decode
from seamflow.rollout.v1 import rollout_service_pb2 as pb

from bench.harness.byte_model import make_byte_model
from rollout.gateway.dispatch.checked_stream import fault_of
from tests.chaos.edges.faulty_engine import FAULTS
from tests.integration.rollout.gateway.test_gateway import Agent, agent, engine, ids_of
from tests.lib.rollout.gateway.support import sampled

TURNS = 12
_IMPOSSIBLE = ("nan", "positive", "unknown_id", "false_context")
_UNPROTECTED = (*_IMPOSSIBLE, "empty")


def vocabulary(folder: Path) -> None:
    """Let the model of the tests know its vocabulary."""
    make_byte_model(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 300}))


async def failures(given: Agent, number: int = TURNS) -> list[SeamflowError]:
    """Of turns one after the other, those without all their tokens among them."""
    found = []
    for i in range(number):
        try:
            if len(await ids_of(given.generate(f"t{i}", max_new_tokens=4))) != 4:
                found.append(SeamflowError("a turn without all its tokens"))
        except grpc.aio.AioRpcError as error:
            found.append(decode(error))
    return found


def plugin(fault: str) -> str:
    """Name of the engine with this fault."""
    return f"tests.chaos.edges.faulty_engine:{fault}"


@pytest.mark.parametrize("fault", FAULTS)
async def test_one_broken_server_of_two_costs_no_turn(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its turns go on at the other; it is idle and so the first choice, but for the ejection."""
    monkeypatch.setattr("tests.integration.rollout.gateway.test_gateway.make_byte_model", keep)
    vocabulary(tmp_path)
    async with (
        engine(engine=plugin(fault), server_id="a") as (broken, _),
        engine(server_id="b") as (good, _),
        agent(tmp_path, broken, good) as given,
    ):
        assert await failures(given) == []


@pytest.mark.parametrize("fault", _UNPROTECTED)
async def test_without_ejection_one_server_fails_turns(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: of two idle servers the first by name is chosen."""
    monkeypatch.setattr("tests.integration.rollout.gateway.test_gateway.make_byte_model", keep)
    vocabulary(tmp_path)
    async with (
        engine(engine=plugin(fault), server_id="a") as (broken, _),
        engine(server_id="b") as (good, _),
        agent(tmp_path, broken, good, ejection_failures=0, poll_seconds=0.01) as given,
    ):
        assert len(await failures(given)) > TURNS // 3


async def test_empty_answers_of_all_servers_are_the_models(tmp_path: Path) -> None:
    """They agree, so the turn ends with what ends an answer."""
    async with (
        engine(engine=plugin("empty"), server_id="a") as (one, _),
        engine(engine=plugin("empty"), server_id="b") as (other, _),
        agent(tmp_path, one, other) as given,
    ):
        assert [await ids_of(given.generate(f"t{i}")) for i in range(TURNS)] == [[0]] * TURNS


@pytest.mark.parametrize(
    ("fault", "kind"), [("nan", PreconditionError), ("false_context", InvalidRequestError)]
)
async def test_the_only_server_is_believed_in_the_end(
    fault: str, kind: type[SeamflowError], tmp_path: Path
) -> None:
    """There is nobody else to ask."""
    async with engine(engine=plugin(fault)) as (broken, _), agent(tmp_path, broken) as given:
        (failure,) = await failures(given, 1)
        assert isinstance(failure, kind)


def keep(folder: Path) -> Path:
    """The model that is there."""
    return folder


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"logprobs": b""}, "8 bytes of ids with 0 of log-probs"),
        ({"logprobs": b"\0\0\x80\x7f" * 2}, "log-prob inf"),
        ({"logprobs": b"\0\0\x80\xff" * 2}, "log-prob -inf"),
        ({"token_ids": b"\xff" * 8}, "token id -1"),
        ({"spans": []}, "spans of 0 tokens for 2"),
    ],
)
def test_what_no_working_server_sends(change: dict[str, object], fault: str) -> None:
    """It is told by its first fault."""
    tokens = sampled([7, 8])
    assert fault_of(tokens, 300, 2) == ""
    for name, value in change.items():
        tokens.ClearField(name)  # type: ignore[arg-type]
        if value:
            setattr(tokens, name, value)
    assert fault in fault_of(tokens, 300, 2)


def test_more_tokens_than_asked_for_and_false_spans_are_impossible() -> None:
    """A span must follow the one before, be sampled, and have a version."""
    tokens = sampled([7, 8])
    assert "at most 1" in fault_of(tokens, 300, 1)
    assert "token id 8" in fault_of(tokens, 8, 2)
    for name, value in (("start", 1), ("origin", 1), ("weight_version", -1), ("server_id", "\n")):
        tokens = sampled([7, 8])
        setattr(tokens.spans[0], name, value)
        assert "a false span" in fault_of(tokens, 300, 2)


async def test_the_gateway_lists_the_servers_it_has_ejected(tmp_path: Path) -> None:
    """With the cause, for operators."""
    async with (
        engine(engine=plugin("nan"), server_id="a") as (broken, _),
        engine(server_id="b") as (good, _),
        agent(tmp_path, broken, good, ejection_failures=1) as given,
    ):
        assert await failures(given) == []
        servers = (await given.stub.ListServers(pb.ListServersRequest(run_id="run"))).servers
        (ejected,) = [each for each in servers if each.ejection == pb.EJECTION_EJECTED]
        assert (ejected.address, ejected.server_id) == (broken, "a")
        assert "log-prob nan" in ejected.ejection_cause
        assert 0 < ejected.ejection_left.ToTimedelta().total_seconds() <= 5
        (other,) = [each for each in servers if each is not ejected]
        assert (other.address, other.ejection_cause) == (good, "")
