"""What only reasoning-gym has: entries of a dataset and their scores."""

from __future__ import annotations

from dataclasses import replace

import pytest
from seamflow.environment import EnvironmentClient, Task
from seamflow.errors import PreconditionError

from tests.lib.environments.contract.cases import REASONING_GYM
from tests.lib.environments.contract.checks import connected, named

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(REASONING_GYM.cannot_run()), reason=REASONING_GYM.cannot_run()),
]


async def asked(
    client: EnvironmentClient, answer: str, **payload: int
) -> tuple[str, dict[str, float], str]:
    """Question, rewards and right answer of a task."""
    async with await client.reset(Task(task_id="t", payload=payload), 1) as episode:
        step = await episode.step({"role": "assistant", "content": answer})
        return str(episode.observation.messages), named(step), str(step.info["expected"])


async def test_the_right_answer_earns_1_where_it_is_marked() -> None:
    """Without the mark it earns nothing."""
    async with connected(REASONING_GYM) as client:
        assert [task.payload async for task in client.tasks()] == [{"index": i} for i in range(8)]
        _, nothing, right = await asked(client, "no idea", index=2)
        assert nothing == {"reward": 0.0, "has_answer": 0.0}
        _, marked, _ = await asked(client, f"I say <answer>{right}</answer>", index=2)
        assert marked == {"reward": 1.0, "has_answer": 1.0}
        _, unmarked, _ = await asked(client, right, index=2)
        assert unmarked["reward"] == 0


async def test_a_payload_may_name_entries_of_another_seed() -> None:
    """Such as held-out ones."""
    async with connected(REASONING_GYM) as client:
        ours, _, _ = await asked(client, "", index=0)
        same, _, _ = await asked(client, "", index=0, seed=3)
        others, _, _ = await asked(client, "", index=0, seed=4)
    assert ours == same != others


async def test_an_index_beyond_the_dataset_is_a_failure_that_names_the_range() -> None:
    """Of the environment."""
    async with connected(REASONING_GYM) as client:
        with pytest.raises(PreconditionError, match="is 8: must be 0 to 7"):
            await asked(client, "", index=8)


@pytest.mark.parametrize("dataset", ["prime_factorization", "complex_arithmetic", "chain_sum"])
async def test_an_answer_that_cannot_be_read_earns_0(dataset: str) -> None:
    """It is the policy's mistake, whatever the data set raises; the right answer still earns 1."""
    case = replace(REASONING_GYM, arguments={"dataset": dataset, "size": 4, "seed": 3})
    async with connected(case) as client:
        for text in ("two times three", "", "x", "1/0", "9" * 400, "2 × 3", "None", "[1, 2"):
            _, rewards, right = await asked(client, f"<answer>{text}</answer>", index=1)
            assert rewards["reward"] < 1.0
        _, rewards, _ = await asked(client, f"<answer>{right}</answer>", index=1)
        assert rewards["reward"] == 1.0
