"""A trainer that grows from one rank to two between steps, and shrinks again."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from safetensors.torch import load_file
from seamflow.trainer.v1 import trainer_service_pb2 as trainer_pb2

from tests.lib.trainer.child import Child
from tests.lib.trainer.ranks.forked_ranks import run_forked
from tests.lib.trainer.services import Neighbours
from tests.lib.trainer.support import JOB_CONFIG, ROUNDING
from tests.system.trainer.ranks.mortal_run import Death, run_mortal
from tests.system.trainer.ranks.test_lost_rank import difference, recorded, whole

STEPS = 4
ELASTIC: dict[str, Any] = {
    "config": {**JOB_CONFIG, "replicas": 2},
    "replicas": {1: 1, 2: 2, 4: 1},  # by the step that begins with them
}
KEYS = ("parameter", "exp_avg", "exp_avg_sq")


def train(num_ranks: int, model: Path, out: Path, **job: Any) -> Path:
    """Four steps on a fixed number of ranks."""
    out.mkdir()
    values = {"config": JOB_CONFIG, "model": str(model), "out": str(out), "steps": STEPS}
    run_forked(num_ranks, run_mortal, {**values, **job})
    return out


@pytest.fixture(scope="module")
def one_rank(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same steps on one rank."""
    return train(1, model, tmp_path_factory.mktemp("elastic") / "one")


@pytest.fixture(scope="module")
def elastic(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One rank, then two, then one."""
    return train(2, model, tmp_path_factory.mktemp("elastic") / "elastic", **ELASTIC)


def greatest(found: Path, expected: Path, step: int = STEPS) -> float:
    """Difference of weights and optimizer state after a step, relative to the greatest element."""
    states = found / f"state_{step}", expected / f"state_{step}"
    return max(difference(*(whole(state, key) for state in states)) for key in KEYS)


def test_a_trainer_that_grows_and_shrinks_makes_the_steps_of_one_world(
    one_rank: Path, elastic: Path
) -> None:
    """Weights and optimizer state to 1e-6 after every step."""
    assert recorded(elastic, "sizes") == [1, 2, 1]
    assert [len(list((elastic / f"state_{n}").glob("*.safetensors"))) for n in range(1, 5)] == [
        1,
        2,
        2,
        1,
    ]
    assert max(greatest(elastic, one_rank, step) for step in range(1, STEPS + 1)) < 1e-6
    moved = difference(*(whole(one_rank / f"state_{step}", "parameter") for step in (1, STEPS)))
    assert moved > 1e-3


@pytest.mark.long(short="tests/system/trainer/ranks/test_elastic_replicas.py")
def test_the_same_sequence_of_sizes_is_the_same_bit_for_bit(
    model: Path, tmp_path: Path, elastic: Path
) -> None:
    """Again from the beginning."""
    assert greatest(train(2, model, tmp_path / "again", **ELASTIC), elastic) == 0.0


@pytest.mark.long(short="tests/system/trainer/ranks/test_elastic_replicas.py")
def test_a_rank_that_is_killed_while_it_joins_or_leaves_loses_nothing(
    model: Path, tmp_path: Path, one_rank: Path
) -> None:
    """One joins in its next life, at the end of the step; one has left all the same."""
    deaths = (
        Death(rank=1, kind="Form", number=1),  # the step begins without it
        Death(rank=1, kind="Leave", number=1, life=2),
    )
    found = train(2, model, tmp_path / "killed", **ELASTIC, deaths=deaths)
    assert recorded(found, "sizes") == [1, 1, 2, 1]
    assert greatest(found, one_rank) < 1e-6


def test_a_state_that_is_not_handed_over_is_noticed(
    model: Path, tmp_path: Path, one_rank: Path
) -> None:
    """Negative control: the new world begins from the first weights."""
    found = train(2, model, tmp_path / "forgot", **ELASTIC, forgets_state=True)
    assert greatest(found, one_rank) > 1e-3


@pytest.mark.long(short="tests/system/trainer/ranks/test_elastic_replicas.py")
async def test_an_operator_sets_the_replicas_of_a_trainer_that_goes_on(
    tmp_path: Path, model: Path, straight_run: Path
) -> None:
    """The whole process under torchrun: each change is there within two steps."""
    neighbours = Neighbours(tmp_path / "weights")
    asked = {2: 1, 5: 2}  # by the step that is leased

    async def ask(replicas: int) -> None:
        async with child.client() as stub:
            with pytest.raises(grpc.aio.AioRpcError, match="give 1 to 2"):
                await stub.SetReplicas(trainer_pb2.SetReplicasRequest(replicas=3))
            await stub.SetReplicas(trainer_pb2.SetReplicasRequest(replicas=replicas))
        neighbours.ledger.ready.set()

    def hold(step: int) -> None:
        if step in asked:  # the step after it has no samples until the trainer was asked
            neighbours.ledger.ready.clear()
            asking.append(asyncio.create_task(ask(asked[step])))

    asking: list[asyncio.Task[None]] = []
    neighbours.ledger.on_lease = hold
    async with neighbours.serving():
        child = Child(tmp_path, model, neighbours)
        flags = ("--num-steps", "10", "--replicas", "2", "--checkpoint.keep", "10")
        torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
        await child.start(*flags, launcher=torchrun)
        code, output = await child.finish()
        await asyncio.gather(*asking)
    assert code == 0, output
    states = sorted((tmp_path / "checkpoints").glob("step_*/state.json"))
    sizes = [json.loads(state.read_text())["world_size"] for state in states]
    assert (sizes[:2], sizes[3:5], sizes[6:]) == ([2, 2], [1, 1], [2, 2, 2, 2])
    newest = neighbours.weights.folder(neighbours.weights.manifests[-1].weight_version)
    published = load_file(newest / "model.safetensors")
    expected = load_file(straight_run / "weights.safetensors")
    differences = [float((published[name] - expected[name]).abs().max()) for name in expected]
    assert max(differences) < ROUNDING
