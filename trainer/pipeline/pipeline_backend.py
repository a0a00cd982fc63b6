"""Models that are cut into stages, one or two on each rank.

Each rank has whole parameters of its stages. Some are on several ranks: embeddings that the output
layer shares, on the first and the last; those of a critic's replicas. Their gradients are added
up before the update, and the first of these ranks counts and saves them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup, Store  # type: ignore[attr-defined]

from trainer.algorithms.base import Algorithm, PolicyTokens
from trainer.commands import Accumulate, Predict
from trainer.config import TrainerConfig
from trainer.model.critic import CRITIC, is_critic
from trainer.model.load_model import DTYPES, checkpoint_tensors
from trainer.model.load_sharded import EmptyModels, empty_models
from trainer.pipeline.interpreter import Interpreter, Peers, StageWork
from trainer.pipeline.layout import POLICY, Layout, layout_of
from trainer.pipeline.stage import Stage, load_stages, parameter_stages
from trainer.pipeline.stage_work import (
    CriticLoss,
    CriticPrediction,
    HiddenStates,
    Loss,
    PolicyLoss,
    PolicyPrediction,
    StatesAlone,
)
from trainer.policy.forward import Predicted, Totals
from trainer.policy.model_input import ModelInput, model_input
from trainer.policy.optimizer import decayed_names
from trainer.policy.policy import Predictions
from trainer.publish.bucket_plan import Source, source_of


def critic_stages(config: TrainerConfig, world_size: int) -> int:
    """Stages of the critic's own model; 0: there is none."""
    return (config.pipeline.critic_stages or world_size) if config.critic == "model" else 0


class PipelineBackend:
    """Each rank carries out its list of actions, on all micro-batches (`Backend`)."""

    part_number, num_parts = 0, 1
    norm_group: ProcessGroup | None = None

    def __init__(
        self, config: TrainerConfig, algorithm: Algorithm, store: Store | None = None
    ) -> None:
        """Load the models and keep this rank's stages. Collective.

        Args:
            config: of the trainer.
            algorithm: of the loss.
            store: in which ranks say that they failed.

        Raises:
            ValueError: a model cannot be cut into as many stages as there are ranks.
        """
        if algorithm.whole_groups:
            raise ValueError(
                f"algorithm.name is {config.algorithm.name!r}, whose loss needs whole groups: use "
                "backend 'fsdp', or another algorithm"
            )
        if config.critic == "model":
            check_separable(algorithm, config.algorithm.name)
        self._rank, world_size = dist.get_rank(), dist.get_world_size()
        self._layout = layout_of(world_size, critic_stages(config, world_size))
        models = empty_models(config, critic=algorithm.critic)
        self._owners = _owners(models, self._layout)
        self.decayed = decayed_names(models.policy, models.critic)
        self._sizes = {n: p.detach().to("meta") for n, p in models.policy.named_parameters()}
        self.routing = models.routing
        embeddings = cast(Any, models.policy).get_input_embeddings()
        self.vocabulary_size = int(embeddings.weight.shape[0])
        loaded = load_stages(config, self._layout, self._rank, critic=algorithm.critic)
        self._stages, self._buffers, self.packed = loaded.stages, loaded.buffers, loaded.packed
        named, self._masters = _named(self._stages), None
        if config.dtype == "bfloat16":
            self._masters = MasterWeights(named, torch.bfloat16)
        self.parameters: Mapping[str, nn.Parameter] = (
            self._masters.parameters if self._masters else named
        )
        self._algorithm, self._config = algorithm, config
        self._interpreter = Interpreter(
            self._layout, self._rank, Peers(self._layout, self._rank, config.device, store)
        )
        self._shared = dict(self._shared_gradients())

    def counts(self, name: str) -> bool:
        """The first rank that has a parameter."""
        return self._owners[name][0] == self._rank

    saves = counts

    def accumulate(
        self, command: Accumulate, totals: Totals, proximal: Predictions
    ) -> dict[str, float]:
        """Add the gradient of a chunk's loss; mean seconds of a task as "model.kind". Collective.

        Raises:
            PeerFailedError: another rank failed or died.
        """
        inputs = self._inputs(command)
        works = {
            model: self._work(model, inputs, self._loss(command, totals, proximal.get(model, {})))
            for model in self._stages
        }
        seconds = self._interpreter.run(command.actions, works)
        return {f"{model}.{kind}": fmean(times) for (model, kind), times in seconds.items()}

    def predict(self, command: Predict) -> Predictions:
        """What the models predict with the present weights. Collective.

        Raises:
            PeerFailedError: another rank failed or died.
        """
        inputs = self._inputs(command)
        found: dict[int, dict[int, Predicted]] = {model: {} for model in self._stages}
        works = {
            model: self._prediction(model, inputs, command, found[model]) for model in self._stages
        }
        self._interpreter.run(command.actions, works)
        return found

    def published_sources(self) -> list[Source]:
        """The tensors to publish, each whole on one rank; the same on every rank."""
        dtype = DTYPES[self._config.dtype]
        return [
            *(
                source_of(name, like, dtype, self._owners[name][:1])
                for name, like in self._sizes.items()
                if not is_critic(name)
            ),
            *(source_of(name, each, dtype, (0,)) for name, each in self._buffers.items()),
        ]

    def published_parts(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name in self._sizes:
            if not is_critic(name) and self.saves(name):
                yield name, self.parameters[name].detach()
        if self._rank == 0:
            yield from self._buffers.items()

    def checkpoint_tensors(self, published: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return checkpoint_tensors(self._stages[POLICY].model, published)

    def own_tensors(self) -> Iterator[torch.Tensor]:
        """The weights in bfloat16, if the stages compute with such."""
        yield from self._masters.computed if self._masters else ()

    def weights_changed(self) -> None:
        if self._masters is not None:
            self._masters.refresh()

    def complete_gradients(self) -> None:
        for name, group in self._shared.items():
            parameter = self.parameters[name]
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=group)

    def reduced(self, totals: Totals) -> dict[str, float]:
        """The policy's last rank knows; all must. Collective."""
        source = self._layout.ranks[POLICY][-1]
        mine = totals.alone() if source == self._rank else {}
        return _broadcast(mine, source, self._config.device)

    def _inputs(self, command: Accumulate | Predict) -> list[ModelInput]:
        by_row = any(stage.by_row for stage in self._stages.values())
        return [
            model_input(batch, self._config.device, packed=self.packed, by_row=by_row)
            for batch in command.micro_batches
        ]

    def _loss(
        self, command: Accumulate | Predict, totals: Totals, proximal: Mapping[int, Predicted]
    ) -> Loss:
        return Loss(
            algorithm=self._algorithm,
            batches=command.micro_batches,
            weight_version=command.weight_version if isinstance(command, Accumulate) else 0,
            totals=totals,
            proximal=proximal,
        )

    def _prediction(
        self,
        model: int,
        inputs: list[ModelInput],
        command: Predict,
        found: dict[int, Predicted],
    ) -> StageWork:
        stage = self._stages[model]
        if not stage.is_last:
            return StatesAlone(stage, inputs)
        kind = PolicyPrediction if model == POLICY else CriticPrediction
        return kind(stage, inputs, replace(self._loss(command, Totals(), {}), kept=found))

    def _work(self, model: int, inputs: list[ModelInput], loss: Loss) -> StageWork:
        stage = self._stages[model]
        if not stage.is_last:
            return HiddenStates(stage, inputs)
        return (PolicyLoss if model == POLICY else CriticLoss)(stage, inputs, loss)

    def _shared_gradients(self) -> Iterator[tuple[str, ProcessGroup]]:
        """By name of a parameter that this rank shares with others: their group. Collective."""
        groups: dict[tuple[int, ...], Any] = {}
        for name, ranks in sorted(self._owners.items()):
            if len(ranks) > 1:
                if ranks not in groups:
                    groups[ranks] = dist.new_group(list(ranks))
                if self._rank in ranks:
                    yield name, groups[ranks]


def _named(stages: dict[int, Stage]) -> dict[str, nn.Parameter]:
    """The parameters of this rank by the names that checkpoints have."""
    return {
        f"{'' if model == POLICY else CRITIC}{name}": parameter
        for model, stage in stages.items()
        for name, parameter in stage.trained.items()
    }


def _owners(models: EmptyModels, layout: Layout) -> dict[str, tuple[int, ...]]:
    """The ranks that hold each parameter; the first one saves it."""
    policy, *replicas = layout.ranks
    found: dict[str, tuple[int, ...]] = {
        name: (policy[stage],)
        for name, stage in parameter_stages(models.policy, len(policy)).items()
    }
    shared = _shared_embeddings(models.policy)
    if shared and len(policy) > 1:
        found[shared] = (policy[0], policy[-1])
    if models.critic is not None:
        stages = parameter_stages(models.critic, len(replicas[0]))
        found |= {
            f"{CRITIC}{name}": tuple(ranks[stage] for ranks in replicas)
            for name, stage in stages.items()
        }
    return found


def _shared_embeddings(model: Any) -> str | None:
    """The name of the embeddings that the output layer shares."""
    output = model.get_output_embeddings()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    embeddings = model.get_input_embeddings().weight
    return names[id(embeddings)] if output.weight is embeddings else None


def _broadcast(numbers: dict[str, float], source: int, device: str) -> dict[str, float]:
    """The numbers of one rank, on all."""
    data = torch.tensor(list(json.dumps(numbers).encode()), dtype=torch.uint8, device=device)
    size = torch.tensor([len(data)], device=device)
    dist.broadcast(size, source)
    if dist.get_rank() != source:
        data = torch.empty(int(size.item()), dtype=torch.uint8, device=device)
    dist.broadcast(data, source)
    found: dict[str, float] = json.loads(bytes(data.tolist()))
    return found


class MasterWeights:
    """float32 weights behind those of a rank's parameters that a stage computes with in bfloat16.

    As FSDP's mixed precision does: each micro-batch's gradient is computed in bfloat16 and added up
    in float32, and the optimizer sees float32 alone.
    """

    def __init__(self, computed: Mapping[str, nn.Parameter], dtype: torch.dtype) -> None:
        """Take over the weights of `computed`, which from now on have type `dtype`."""
        self._computed = dict(computed)
        self.parameters = {
            name: nn.Parameter(parameter.detach().clone()) for name, parameter in computed.items()
        }
        """By name; they get the gradients."""
        for name, parameter in self._computed.items():
            parameter.data = parameter.data.to(dtype)
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                partial(_move_gradient, self.parameters[name])
            )

    @property
    def computed(self) -> list[torch.Tensor]:
        return [parameter.detach() for parameter in self._computed.values()]

    @torch.no_grad()
    def refresh(self) -> None:
        """Compute with the present weights from now on."""
        for name, parameter in self._computed.items():
            parameter.copy_(self.parameters[name])


def _move_gradient(master: nn.Parameter, parameter: torch.Tensor) -> None:
    assert parameter.grad is not None, "called once it is there"
    wide = parameter.grad.to(master.dtype)
    master.grad = wide if master.grad is None else master.grad.add_(wide)
    parameter.grad = None


_ROWS, _TOKENS = 2, 5


def check_separable(algorithm: Algorithm, name: str) -> None:
    """Check that a critic can be trained beside the policy, each with its part of the loss.

    In a pipeline the last stages of both lie on different ranks. The policy's needs the critic's
    values without their gradient; the critic's gets the gradient of its values from the same loss,
    with the recorded log-probs for the policy's. That is right if the gradient of the values does
    not depend on log-probs, so it is compared with different ones.

    Raises:
        ValueError: they differ.
    """
    tokens = _tokens()
    grads = [
        _gradient(algorithm, replace(tokens, logprobs_BT=scale * tokens.behaviour_logprobs_BT))
        for scale in (1.0, 1.5)
    ]
    if not torch.equal(*grads):
        raise ValueError(
            f"algorithm.name is {name!r}: the gradient of its values depends on log-probs, so the "
            "critic cannot be trained beside the policy; set critic to 'layer' or backend to 'fsdp'"
        )


def _gradient(algorithm: Algorithm, tokens: PolicyTokens) -> torch.Tensor:
    values = tokens.values_BT
    assert values is not None
    logprobs = tokens.logprobs_BT.clone().requires_grad_()
    loss = algorithm.loss(replace(tokens, logprobs_BT=logprobs)).loss
    (gradient,) = torch.autograd.grad(loss, values)
    return gradient


def _tokens() -> PolicyTokens:
    rng = torch.Generator().manual_seed(0)
    shape = _ROWS, _TOKENS
    drawn = [torch.rand(shape, generator=rng, dtype=torch.float64) for _ in range(4)]
    ones, zeros = torch.ones(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    return PolicyTokens(
        logprobs_BT=-drawn[0],
        values_BT=drawn[1].requires_grad_(),
        behaviour_logprobs_BT=-drawn[0],
        advantages_BT=drawn[2][:, :1].expand(shape),
        weights_BT=ones,
        turn_rewards_BT=zeros,
        reference_logprobs_BT=-drawn[3],
        staleness_BT=torch.zeros(shape, dtype=torch.int64),
        loss_mask_BT=torch.ones(shape, dtype=torch.bool),
        rollouts_B=torch.arange(_ROWS),
        groups_B=torch.zeros(_ROWS, dtype=torch.int64),
    )
