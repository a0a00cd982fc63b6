"""Ways not to learn and what else is to be told, and runs that learn."""

from __future__ import annotations

from tests.suites.health.way import REFUSED, Way

_AGENTS = "tests.suites.health.agents"


def _agent(name: str) -> tuple[str, ...]:
    return ("--agent", f"{_AGENTS}:{name}")


WAYS = (
    Way(
        name="reward_always_0",
        rule="rewards_equal",
        cure="check the reward function",
        flags=_agent("NoReward"),
    ),
    Way(
        name="reward_of_the_task",
        rule="no_reward_differences",
        cure="tell better answers from worse ones",
        flags=_agent("RewardOfTask"),
    ),
    Way(
        name="all_groups_discarded",
        rule="no_reward_differences",
        cure="change the tasks",
        flags=(*_agent("NoReward"), "--zero-variance-reward", "reward"),
    ),
    Way(
        name="model_says_one_thing",
        rule="entropy_collapsed",
        cure="higher clip_high",
        # Steps of a second: the terminal is written once in each.
        flags=("--prepare", "tests.suites.health.sure_model", "--groups-per-step", "32"),
    ),
    Way(
        name="learning_rate_100",
        rule="logprobs_apart",
        cure="Lower trainer.optimizer.learning_rate",
        settings=("trainer.optimizer.learning_rate=100",),
    ),
    Way(
        name="max_grad_norm_1e-9",
        rule="gradient_scaled_away",
        cure="Raise trainer.optimizer.max_grad_norm",
        settings=("trainer.optimizer.max_grad_norm=1e-9",),
    ),
    Way(
        name="rewards_below_epsilon",
        rule="gradient_zero",
        cure="greater scale",
        settings=("trainer.algorithm.advantage_epsilon=1e13",),
    ),
    Way(
        name="answers_cut",
        rule="answers_cut",
        cure="max_new_tokens",
        flags=_agent("OnlyWhole"),
    ),
    Way(
        name="cut_and_masked",
        rule="no_trainable_tokens",
        cure="set mask_truncated to false",
        algorithm="mask_truncated = true\n",
        flags=(*_agent("Cut"), "--prepare", "tests.suites.health.sure_model"),
    ),
    Way(
        name="reward_raises",
        rule="tasks_fail",
        cure="Mend the agent",
        flags=_agent("Broken"),
    ),
    Way(
        name="trained_on_the_opposite",
        rule="heldout_below_start",
        cure="compare both",
        settings=(
            "evaluation.every_steps=4",
            "evaluation.metric=letters",
            "evaluation.samples=64",
            "trainer.algorithm.reward=reward",
            "trainer.num_steps=16",
        ),
        within=12,
        flags=(*_agent("Opposite"), "--heldout-tasks", "tasks.jsonl"),
    ),
    Way(
        name="reward_without_success",
        rule="reward_without_success",
        cure="what counts as success",
        settings=(
            "trainer.algorithm.reward=reward",
            "trainer.num_steps=24",
            "trainer.optimizer.learning_rate=3e-2",
        ),
        within=20,
        flags=_agent("NeverSolved"),
    ),
    Way(
        name="all_cut_without_success",
        rule="answers_cut",
        cure="max_new_tokens",
        settings=("trainer.algorithm.reward=reward",),
        flags=_agent("CutNeverSolved"),
    ),
    Way(
        name="trainer_killed",
        rule="process_restarted",
        cure="says why it ended",
        settings=("trainer.num_steps=16",),
        within=12,
        kills="trainer",
    ),
    Way(
        name="group_of_one",
        rule=REFUSED,
        cure="Set launcher.group_size to 2 or more",
        flags=("--group-size", "1"),
    ),
)

HEALTHY = (
    Way(name="grpo"),
    Way(name="dapo", settings=("trainer.algorithm.name=dapo",)),
    Way(
        name="ppo_groups_of_one",
        settings=("trainer.algorithm.name=ppo",),
        flags=("--group-size", "1", "--groups-per-step", "32"),
    ),
    Way(name="answers_end_at_the_limit", flags=_agent("FourLetters")),
    Way(name="in_turn_on_one_node", flags=("--nodes", '["node-a: rollout train"]')),
    Way(
        name="solved",
        settings=(
            "trainer.optimizer.learning_rate=3e-2",
            "trainer.num_steps=30",
            "evaluation.every_steps=10",
        ),
        flags=("--heldout-tasks", "tasks.jsonl"),
    ),
)

RESUMED = (
    Way(name="resumed", settings=("trainer.num_steps=20",)),
    Way(
        name="resumed_with_checkpoints",
        settings=("trainer.num_steps=20", "trainer.checkpoint.every=4"),
    ),
)
