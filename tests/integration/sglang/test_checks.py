"""The checks of the loop can fail: each finds the fault that it is there for."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import NoReturn

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from seamflow.trajectory.v1 import trajectory_pb2
from transformers import Qwen3Config, Qwen3ForCausalLM

from services.launcher.report.summary import Received, Token
from tests.lib.launcher.support import make_trajectory, make_turn
from tests.lib.sglang.checksums import published_checksums
from tests.lib.sglang.engines import ChecksumWatch, EngineProcess
from tests.lib.sglang.leases import half_segments
from tests.lib.sglang.logprobs import recompute, sampled_spans
from tests.lib.sglang.quickstart import make_quickstart
from tests.lib.sglang.strikes import Strike
from tests.lib.sglang.turns import stale_chunks, turns_before, unfinished, was_moved


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A very small model of the quickstart's architecture."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=10,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        intermediate_size=8,
        tie_word_embeddings=True,
    )
    folder = tmp_path_factory.mktemp("model")
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def sampled(model: Path, temperature: float) -> trajectory_pb2.Turn:
    """A turn of two prompt tokens and two spans, with the model's own log-probs."""
    turn = make_turn(([3, 4], 0, "a"), ([5], 0, "b"))
    turn.sampling.temperature = temperature
    tokens = torch.tensor([list(turn.tokens.token_ids)])
    with torch.inference_mode():
        logits = Qwen3ForCausalLM.from_pretrained(model)(tokens).logits[0] / temperature
    logprobs = logits.log_softmax(-1)[:-1].gather(-1, tokens[0, 1:, None])[:, 0]
    turn.tokens.logprobs.extend([0.0, 0.0, *logprobs[1:].tolist()])
    return turn


def test_recomputing_finds_a_wrong_logprob(model: Path) -> None:
    """Right log-probs agree to rounding; a token with another one is found, with its place."""
    turn = sampled(model, temperature=0.7)
    right = recompute(sampled_spans([make_trajectory(turn)]), lambda version: model)
    assert (right.num_spans, right.num_tokens) == (2, 3)
    assert right.max_difference < 1e-5
    turn.tokens.logprobs[4] += 0.01
    wrong = recompute(sampled_spans([make_trajectory(turn)]), lambda version: model)
    assert wrong.max_difference == pytest.approx(0.01, abs=1e-4)
    assert "of b at 4" in wrong.worst


def test_a_later_turn_is_recomputed_behind_the_tokens_of_its_parent(model: Path) -> None:
    """Only the tokens shared with the parent come before it."""
    parent = make_turn(([3, 4], 0, "a"), turn_id="first")
    child = make_turn(([5], 0, "a"), turn_id="second")
    child.prefix_turn_id, child.prefix_length = "first", 3
    spans = sampled_spans([make_trajectory(parent, child)])
    assert [span.context for span in spans] == [(1, 2, 3, 4), (1, 2, 3, 1, 2, 5)]


def test_one_changed_value_changes_the_checksum_of_its_tensor_only(
    model: Path, tmp_path: Path
) -> None:
    """The key projection is a part of what SGLang calls qkv_proj."""
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.0.self_attn.k_proj.weight"][0, 0] += 1e-6
    save_file(tensors, tmp_path / "model.safetensors")
    before, after = published_checksums(model), published_checksums(tmp_path)
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"model.layers.0.self_attn.qkv_proj.weight"}


@pytest.mark.parametrize(
    ("token_ids", "ended", "num_wrong"),
    [([1, 2, 3, 4], True, 0), ([1, 2, 3], True, 1), ([1, 2, 3, 4], False, 1)],
    ids=["whole", "half", "open"],
)
def test_only_whole_turns_may_be_leased(
    token_ids: list[int], ended: bool, num_wrong: int, tmp_path: Path
) -> None:
    """A sample without the turn's last token is found, and so is a turn that has not ended."""
    turn = make_turn(([3, 4], 0, "a"))
    if not ended:
        turn.ClearField("finish_reason")
    received: Received = {("rollout", "turn"): {0: [Token(3, 0)], 1: [Token(4, 0)]}}
    mask = [0, 0, 1, 1][: len(token_ids)]
    sample = {"sample_id": "s", "rollout_id": "rollout", "token_ids": token_ids, "loss_mask": mask}
    leased = tmp_path / "leased.jsonl"
    leased.write_text(json.dumps(sample) + "\n")
    num_leased, wrong = half_segments(leased, received, [make_trajectory(turn)])
    assert num_leased == 1
    assert len(wrong) == num_wrong


def test_a_turn_of_two_servers_was_moved() -> None:
    """Tokens of the prompt have no server; two spans of one server are no move."""
    moved = make_turn(([3], 0, "a"), ([4], 0, "b"))
    stayed = make_turn(([3], 0, "a"), ([4], 1, "a"))
    assert was_moved(make_trajectory(moved, stayed)) == 1


def test_a_turn_that_never_ended_is_found(tmp_path: Path) -> None:
    """It counts if agents had tokens of it in time; one that is not stored at all counts too."""
    log = tmp_path / "received.jsonl"
    turns = [{"rollout_id": "rollout", "turn_id": name} for name in ("ended", "open", "gone")]
    log.write_text("".join(json.dumps(turn) + "\n" for turn in turns))
    size = log.stat().st_size
    with log.open("a") as file:
        print(json.dumps({"rollout_id": "rollout", "turn_id": "late"}), file=file)
    open_turn = make_turn(([3], 0, "a"), turn_id="open")
    open_turn.ClearField("finish_reason")
    stored = make_trajectory(make_turn(([3], 0, "a"), turn_id="ended"), open_turn)
    found = unfinished(turns_before(log, size), [stored])
    assert found == {("rollout", "open"), ("rollout", "gone")}


def test_old_weights_after_a_restart_are_found(tmp_path: Path) -> None:
    """Only those of the engine that was killed, and only after it was back."""
    log = tmp_path / "received.jsonl"
    before = json.dumps({"spans": [[0, 1, 6, "a"]]}) + "\n"
    after = [[0, 1, 6, "b"], [1, 1, 7, "a"], [2, 1, 6, "a"]]
    log.write_text(before + json.dumps({"spans": after}) + "\n")
    strike = Strike(
        node="a",
        victim="scheduler",
        newest_version=7,
        log_struck=0,
        log_back=len(before),
        seconds=1.0,
    )
    assert stale_chunks(log, strike) == ["a: 6 instead of 7"]


async def test_an_engine_killed_in_mid_answer_gave_none() -> None:
    """Half an answer is an `OSError`, as none at all is: the watch goes on with the next engine."""

    async def half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"weight_version": ')
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(half, "127.0.0.1", 0, family=socket.AF_INET) as server:
        port = server.sockets[0].getsockname()[1]
        engine = EngineProcess(main=psutil.Process(), url=f"http://127.0.0.1:{port}")
        with pytest.raises(ConnectionError, match="cut off: IncompleteRead"):
            await asyncio.to_thread(engine.ask, "/model_info")


async def test_a_watch_that_cannot_go_on_fails_its_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault of the check itself must not look like tensors that are all right."""

    def broken(watch: ChecksumWatch, node: str) -> NoReturn:
        raise KeyError(node)

    monkeypatch.setattr(ChecksumWatch, "_look", broken)
    with pytest.raises(KeyError, match="node-a"):
        async with ChecksumWatch(make_quickstart(tmp_path / "run")).watching(["node-a"]):
            while len(asyncio.all_tasks()) > 1:
                await asyncio.sleep(0.01)
