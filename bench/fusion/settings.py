"""RLHFuse's twelve settings of an actor and a critic (arXiv 2409.13221, table 3), in its ticks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainer.pipeline.fused_schedule.problem import Pipeline, Problem


@dataclass(frozen=True, slots=True)
class Setting:
    """One row. Backward takes twice as long as forward."""

    actor_stages: int
    critic_stages: int
    micro_batches: int
    """Of the actor; a replica of the critic has its share of them."""
    actor_forward: int
    critic_forward: int
    actor_bytes: float
    critic_bytes: float
    serial: int
    """Time of one model after the other."""
    greedy: int
    """Time of the greedy schedule."""
    bound: int
    """No schedule is shorter."""
    paper: int
    """Time that the paper's search found."""
    paper_memory: float
    """Memory of its schedule, in that of 1F1B."""

    def __str__(self) -> str:
        stages = f"{self.actor_stages}+{self.critic_stages} stages"
        return f"{stages}, {self.micro_batches} micro-batches"

    def problem(self) -> Problem:
        """Without a capacity."""
        replicas = self.actor_stages // self.critic_stages
        return fused_problem(
            _pipeline(self.actor_stages, self.micro_batches, self.actor_forward, self.actor_bytes),
            _pipeline(
                self.critic_stages,
                self.micro_batches // replicas,
                self.critic_forward,
                self.critic_bytes,
            ),
            replicas,
        )


def _pipeline(stages: int, micro_batches: int, forward: int, size: float) -> Pipeline:
    return Pipeline(
        nodes=tuple(range(stages)),
        num_micro_batches=micro_batches,
        forward=(forward,) * stages,
        backward=(2 * forward,) * stages,
        activation_bytes=size,
    )


SETTINGS = (
    Setting(8, 4, 32, 5, 4, 1.95, 2.0, 813, 741, 708, 708, 1.26),
    Setting(8, 4, 16, 5, 4, 1.95, 2.0, 477, 425, 372, 372, 1.00),
    Setting(8, 4, 8, 5, 4, 1.95, 2.0, 309, 239, 225, 225, 1.00),
    Setting(8, 8, 32, 5, 2, 1.95, 1.0, 819, 755, 702, 702, 1.31),
    Setting(8, 8, 16, 5, 2, 1.95, 1.0, 483, 419, 366, 366, 1.19),
    Setting(8, 8, 8, 5, 2, 1.95, 1.0, 315, 225, 225, 225, 1.00),
    Setting(16, 8, 64, 2, 2, 1.64, 2.0, 708, 632, 618, 618, 1.26),
    Setting(16, 8, 32, 2, 2, 1.64, 2.0, 420, 366, 330, 330, 1.00),
    Setting(16, 8, 16, 2, 2, 1.64, 2.0, 276, 214, 186, 186, 1.00),
    Setting(16, 16, 64, 2, 1, 1.64, 1.0, 711, 651, 606, 613, 1.47),
    Setting(16, 16, 32, 2, 1, 1.64, 1.0, 423, 363, 318, 318, 1.22),
    Setting(16, 16, 16, 2, 1, 1.64, 1.0, 279, 219, 186, 186, 1.00),
)


def fused_problem(
    actor: Pipeline, critic: Pipeline, num_replicas: int, capacity: float = math.inf
) -> Problem:
    """An actor on all nodes, and replicas of a critic side by side, in the opposite direction.

    Args:
        actor: stage s on node s.
        critic: the first replica, whatever its nodes; the others are alike.
        num_replicas: how many times the critic's stages fit on the actor's nodes.
        capacity: bytes of activations that a node holds.

    Raises:
        ValueError: the stages of the replicas are not as many as those of the actor.
    """
    size = critic.num_stages
    if size * num_replicas != actor.num_stages:
        raise ValueError(
            f"{num_replicas} critics of {size} stages do not cover {actor.num_stages} stages"
        )
    replicas = [
        Pipeline(
            nodes=tuple(reversed(range(index * size, (index + 1) * size))),
            num_micro_batches=critic.num_micro_batches,
            forward=critic.forward,
            backward=critic.backward,
            activation_bytes=critic.activation_bytes,
        )
        for index in range(num_replicas)
    ]
    return Problem(pipelines=(actor, *replicas), capacity=capacity)


def serial_memory(problem: Problem) -> float:
    """The most bytes that 1F1B of one model after the other holds on a node."""
    return max(
        min(each.num_micro_batches, each.num_stages) * each.activation_bytes
        for each in problem.pipelines
    )
