"""The step on an accelerator that is not the host, without a GPU.

Forward pass, loss, backward pass, norms and AdamW of whole models run as they are on tensors of the
toy device (`toy_device.py`), which computes on the CPU. It cannot see what FSDP does, nor what is
computed again in the backward pass, streams, pinned memory, kernels of a GPU, and storages that are
moved (`DeviceState`). It has a process of its own: torch counts devices at its first backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from services.lib.transformer.packing import Packing
from tests.lib.trainer.device.toy_device import (
    DEVICE,
    MixedDevicesError,
    ToyDevice,
    ToyTensor,
    moved,
    toy_device,
)
from tests.lib.trainer.ranks.forked_ranks import run_forked
from tests.lib.trainer.support import JOB_CONFIG, make_samples, trainer_config
from trainer.algorithms.base import make_algorithm
from trainer.config import TrainerConfig
from trainer.config.optimization import ALGORITHMS
from trainer.data.token_sequence import sequence
from trainer.host_copy import HostCopy, copy_stream
from trainer.model.critic import add_value_head
from trainer.model.load_model import Models, load_whole
from trainer.model.token_predictions import predict_within
from trainer.policy import forward, model_input, sharded_backend
from trainer.policy.policy import Policy
from trainer.policy.sharded_backend import ShardedBackend
from trainer.step.chunk_commands import ChunkCommands

_ROUNDING = 1e-9
"""In float64: some operations of the CPU are made of others on another device."""
_WITH: dict[str, dict[str, Any]] = {
    "dpo": {"algorithm__reference_column": "ref_logprobs"},
    "tba": {"algorithm__reference_column": "ref_logprobs"},
    "distillation": {"algorithm__reference_column": "ref_logprobs"},
    "dr_grpo": {"algorithm__loss_length": 8},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "padded": {"batch__packing": False},
    **{
        name: {"algorithm__name": name, "batch__micro_batch_tokens": 512, **_WITH.get(name, {})}
        for name in ALGORITHMS
    },
    "two steps": {},
}
READS = {"ppo": 2, "ma_ppo": 2, "turn_ppo": 2, "dpo": 99}
"""Numbers that the host reads in each pass. transformers asks for one; the number of actions of a
critic is a shape; dpo picks the best and the worst of each group on the host."""


class _OneRank:
    """The mesh of a model that is not sharded."""

    ndim = 1
    get_local_rank = staticmethod(lambda _: 0)
    size = staticmethod(lambda _: 1)
    get_group = staticmethod(lambda _: None)


def policy_of(config: TrainerConfig, device: str) -> Policy:
    """The whole models, on a device."""
    algorithm = make_algorithm(config)
    model = load_whole(config, config.model)
    if algorithm.critic:
        torch.manual_seed(0)
        add_value_head(model)
    predict_within(model)
    if device == DEVICE:
        moved(model)
    given = config.model_copy(update={"device": device})
    models = Models(policy=model, critic=None, packed=config.batch.packing, routing="")
    backend = ShardedBackend(models, cast("DeviceMesh", _OneRank()), algorithm, given)
    return Policy(backend, given)


def steps(
    config: TrainerConfig, policy: Policy, number: int, device: ToyDevice | None = None
) -> tuple[list[dict[str, float]], list[list[str]]]:
    """Metrics of steps, and what the host waited for while gradients were computed."""
    metrics, waits = [], []
    commands = ChunkCommands(config, 1, packed=config.batch.packing)
    for step in range(1, number + 1):
        (command,) = commands.of([sequence(each) for each in make_samples(step)], step)
        before = len(device.waits) if device else 0
        policy.accumulate(command)
        passes = ["pass"] * len(command.micro_batches)
        waits.append([*device.waits[before:], *passes] if device else [])
        metrics.append(policy.optimize(step))
    return metrics, waits


def compare(model: Path, name: str) -> None:
    """A step, or two, on the toy device against the same on the host."""
    number = 2 if name == "two steps" else 1
    settings = {**JOB_CONFIG, **SETTINGS[name]}
    config = trainer_config(run_id="r", model=model, checkpoint__folder="c", **settings)
    with toy_device() as device:
        there = policy_of(config, DEVICE)
        metrics, waits = steps(config, there, number, device)
        _check_waits(waits, READS.get(name, 1))
        # All that lending must move, and a checkpoint copies, is on the device.
        state = there.state()
        assert len([*there.device_tensors()]) == len(state)
        assert all(isinstance(tensor, ToyTensor) for tensor in state.values())
        copied = HostCopy(copy_stream("cpu")).start(state.items())
    here = policy_of(config, "cpu")
    expected, _ = steps(config, here, number)
    for ours, theirs in zip(metrics, expected, strict=True):
        assert ours == pytest.approx(theirs, abs=_ROUNDING)
    for name, tensor in here.state().items():
        assert not isinstance(copied[name], ToyTensor)
        torch.testing.assert_close(copied[name], tensor, rtol=0, atol=_ROUNDING)


def _join() -> None:
    with toy_device():
        pass  # before the first backward pass
    dist.init_process_group("gloo")


def _check_waits(waits: list[list[str]], most: int) -> None:
    """Masks select the tokens to predict; at most so many numbers are read in a pass."""
    for of_step in waits:
        read = [each for each in of_step if each not in ("index", "index_put", "pass")]
        assert len(read) <= most * of_step.count("pass"), read


def compare_all(model: Path) -> None:
    """Each algorithm."""
    _join()
    for name in SETTINGS:
        print(name, flush=True)
        compare(model, name)


@pytest.mark.long(short="tests/system/trainer/model/test_toy_device.py")
def test_a_step_computes_on_its_device_alone(model: Path) -> None:
    """No tensor of the host is among its operations; results are those of the host."""
    run_forked(1, compare_all, model)


def _host_tokens(patch: pytest.MonkeyPatch) -> None:
    """The packed tokens are not sent to the device."""
    of = Packing.of
    patch.setattr(Packing, "of", lambda ids, lengths, *_: of(ids, lengths, "cpu"))


def _host_index(patch: pytest.MonkeyPatch) -> None:
    """Which outputs count stays on the host."""
    real = model_input.PackedInput.__init__

    def init(self: model_input.PackedInput, *given: Any) -> None:
        real(self, *given)
        self._predicts_N = self._predicts_N.cpu()

    patch.setattr(model_input.PackedInput, "__init__", init)


def _host_advantages(patch: pytest.MonkeyPatch) -> None:
    """A part of the loss is made on the host."""
    tokens = forward._tokens

    def on_host(*given: Any) -> Any:
        found = tokens(*given)
        return replace(found, advantages_BT=found.advantages_BT.cpu())

    patch.setattr(forward, "_tokens", on_host)


def _read_metric(patch: pytest.MonkeyPatch) -> None:
    """A metric of each micro-batch is read: the host waits for the device."""
    real = forward.policy_loss

    def reading(*given: Any) -> Any:
        loss, sums, rows = real(*given)
        read = torch.tensor(sums["entropy"].item(), device=DEVICE)
        return loss, {**sums, "entropy": read}, rows

    patch.setattr(sharded_backend, "policy_loss", reading)


def _host_state(patch: pytest.MonkeyPatch) -> None:
    """AdamW without `fused` keeps its count of steps on the host."""
    adamw = torch.optim.AdamW
    patch.setattr(torch.optim, "AdamW", lambda *given, fused, **named: adamw(*given, **named))


MUTATIONS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], type[Exception]]] = {
    "tokens of the host": (_host_tokens, MixedDevicesError),
    "an index of the host": (_host_index, MixedDevicesError),
    "advantages of the host": (_host_advantages, MixedDevicesError),
    "a metric that is read": (_read_metric, AssertionError),
    "optimizer state of the host": (_host_state, AssertionError),
}


def mutated(model: Path) -> None:
    """The comparison finds each mutation."""
    _join()
    for name, (mutate, error) in MUTATIONS.items():
        print(name, flush=True)
        with pytest.MonkeyPatch.context() as patch, pytest.raises(error):
            mutate(patch)
            compare(model, "two steps")
    compare(model, "two steps")


def test_what_is_left_on_the_host_is_found(model: Path) -> None:
    """Negative controls: four things that a GPU would refuse or wait for, and one not moved."""
    run_forked(1, mutated, model)
