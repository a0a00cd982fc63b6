"""Routed experts on their way from rollout servers through the gateway into samples."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from seamflow.common.v1 import tokens_pb2
from seamflow.rollout.v1 import rollout_server_service_pb2 as pb
from seamflow.trajectory.v1 import trajectory_pb2

from bench.harness.byte_model import make_byte_model
from rollout.gateway.prompt.chat_template import ChatTemplate
from rollout.server import servicer
from rollout.server.cli import build
from rollout.server.config import RolloutServerConfig
from services.chassis.errors import ConfigError
from services.chassis.rpc.server import started
from services.lib.routed_experts import RoutingShape
from services.lib.token_bytes import unpack_ids
from tests.integration.rollout.gateway.test_turn import World
from tests.lib.rollout.gateway.support import ScriptedServer, gateway, scripted
from tests.lib.rollout.server.routed_experts import SHAPE, save_experts, trained
from tests.lib.rollout.server.support import VOCAB
from tests.lib.trainer.model.whole_rows import whole_rows
from tests.lib.trainer.support import make_samples
from tests.lib.trajectory_manager.memory.store import memory_store
from trainer.config import AlgorithmConfig
from trainer.leasing.accepted_samples import SampleReader
from trainer.policy.forward import forward
from trajectory_manager.api import conversion
from trajectory_manager.service import sample_builder


class RecordingServer(ScriptedServer):
    """Reports experts that tell the index of their token, as often as it is told."""

    reports_late = False
    """Those of all elements with the last one."""
    interrupts = 0
    """Calls that end with INTERRUPTED."""
    records = True
    """Whether it says that it records experts."""

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: Any
    ) -> pb.GetServerInfoResponse:
        """With its feature."""
        info = await super().GetServerInfo(request, context)
        info.features.extend(["routed_experts"] if self.records else [])
        return info

    async def GenerateTokens(
        self, request: pb.GenerateTokensRequest, context: Any
    ) -> AsyncIterator[pb.GenerateTokensResponse]:
        """The scripted answer, with a record of what has not been reported."""
        first, end = max(request.routed_experts_from, 1), len(unpack_ids(request.token_ids))
        async for response in super().GenerateTokens(request, context):
            end += len(unpack_ids(response.tokens.token_ids))
            is_last = response.finish_reason != tokens_pb2.FINISH_REASON_UNSPECIFIED
            if is_last and self.interrupts:
                self.interrupts -= 1
                response.finish_reason = tokens_pb2.FINISH_REASON_INTERRUPTED
            if is_last or not self.reports_late:
                response.routed_experts.start = first
                response.routed_experts.num_tokens = end - first
                response.routed_experts.num_layers = response.routed_experts.num_chosen = 1
                response.routed_experts.experts = bytes(range(first, end))
                first = end
            yield response


@pytest.mark.parametrize(("reports_late", "records"), [(False, True), (True, True), (True, False)])
async def test_every_token_keeps_its_experts_once(
    tmp_path: Path, *, reports_late: bool, records: bool
) -> None:
    """Over messages, an interruption, and a second turn that a stop string cuts."""
    server, store = RecordingServer(), memory_store()
    server.reports_late, server.records, server.interrupts = reports_late, records, 1
    async with (
        scripted(server) as address,
        gateway(make_byte_model(tmp_path), store, servers=(address,)) as (agent, stub, runs),
    ):
        world = World(agent, stub, runs, server, ChatTemplate(tmp_path))
        await world.start()
        server.answers = [[[7], [8, 9]], [[10, 11]]]
        server.answers += [[world.ids("ab"), world.ids("c.de"), world.ids("f")], [[99]]]
        await world.generate("t1", [1, 2, 3])
        stop = tokens_pb2.SamplingParams(stop=["."])
        await world.generate("t2", [1, 2, 3, 7, 8, 9, 10, 11, 5], sampling=stop)
        (found,) = await store.tokens.read("run", ["r"])
    assert found is not None
    (sample,) = sample_builder.of_rollout(*found)
    assert sample.tokens.num_tokens == 13
    experts = {n: e for each in sample.routed for n, e in enumerate(each.experts, each.start)}
    end = 13 if records else 8  # what a cut turn has is asked for where it is recorded
    assert experts == {n: n for n in range(1, end)}
    assert sum(each.num_tokens for each in sample.routed) == end - 1
    assert len(server.answers) == (not reports_late or not records)


@pytest.mark.parametrize("most", [1 << 20, 40])
async def test_a_sample_replays_what_the_engine_chose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """From a real engine, also over small messages, to the log-probs recorded at sampling."""
    monkeypatch.setattr(servicer, "_ROUTED_BYTES", most)
    folder, store = save_experts(tmp_path / "experts"), memory_store()
    config = RolloutServerConfig(
        model=folder, run_id="run", server_id="s1", port=0, record_routed_experts=True
    )
    byte_model = make_byte_model(tmp_path / "bytes")
    async with (
        build(config) as service,
        started(service, config, "rollout_server") as port,
        gateway(byte_model, store, servers=(f"127.0.0.1:{port}",)) as (agent, stub, runs),
    ):
        world = World(agent, stub, runs, ScriptedServer(), ChatTemplate(byte_model))
        await world.start()
        sampling = tokens_pb2.SamplingParams(max_new_tokens=24, ignore_eos=True)
        first = await world.generate("t1", [3, 4, 5, 6], sampling=sampling)
        ids = [n for event in first for n in event.chunk.tokens.token_ids]
        await world.generate("t2", [3, 4, 5, 6, *ids, 7], sampling=sampling)
        (found,) = await store.tokens.read("run", ["r"])
    assert found is not None
    (built,) = sample_builder.of_rollout(*found)
    message = trajectory_pb2.Sample()
    conversion.fill_sample(message, built)
    assert conversion.add_routed_experts(message, built) == 52 * SHAPE.token_bytes
    message.rewards.add(name="reward", value=1.0)
    read = SampleReader(AlgorithmConfig(), VOCAB, SHAPE).read([message])
    ((item,), rejected) = read.sequences, read.rejected
    assert not rejected
    model, experts = trained(folder), item.routed_experts_TLK
    assert experts is not None
    recorded = torch.tensor(item.behaviour_logprobs_T)[1:]
    for given, is_same in ((experts, True), ((experts + 1) % SHAPE.num_experts, False)):
        row = replace(whole_rows([item.token_ids_T.tolist()]), routed_experts_BTLK=given[None])
        logprobs = forward(model, row, "cpu", packed=False).logprobs_BT[0]
        difference = (logprobs - recorded)[torch.tensor(item.loss_mask_T)[1:]].abs().max()
        assert (difference < 1e-4) == is_same


@pytest.mark.parametrize(
    ("routing", "reason"),
    [
        (RoutingShape(3, 2, 8), "2 layers with 2 choices and have 12 bytes for 3 tokens"),
        (RoutingShape(2, 2, 300), "the model needs 2 layers, 2 choices and 8 bytes a token"),
        (RoutingShape(2, 2, 5), "name expert 5, a layer of the model has 5"),
    ],
)
def test_records_of_another_model_reject_their_group(routing: RoutingShape, reason: str) -> None:
    """By the reader, with what differs; a model that cannot replay ends the trainer instead."""
    sample = make_samples(0, groups=1, group_size=1)[0]
    sample.routed_experts.add(
        start=1, num_tokens=3, num_layers=2, num_chosen=2, experts=bytes([0, 1, 2, 3, 4, 5] * 2)
    )
    (message,) = SampleReader(AlgorithmConfig(), 999, routing).read([sample]).rejected.values()
    assert reason in message
    with pytest.raises(ConfigError, match=r"PhimoeForCausalLM cannot; set batch\.replay"):
        SampleReader(AlgorithmConfig(), 999, "PhimoeForCausalLM cannot").read([sample])
    assert SampleReader(AlgorithmConfig(), 999, None).read([sample]).sequences
