"""A pipeline computes the steps that FSDP computes, and the two exchange checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.lib.trainer.ranks.whole_run import greatest_difference, losses, run, same_rows
from tests.lib.trainer.support import JOB_CONFIG, ROUNDING, make_model, trainer_config
from trainer.model.load_model import load_whole
from trainer.pipeline.stage import Stage

STEPS = [1, 2, 3, 4]
PIPELINE = {"backend": "pipeline"}


def job_config(critic_model: Path, **settings: Any) -> dict[str, Any]:
    """PPO with a critic of its own."""
    critic = {"critic": "model", "critic_model": str(critic_model)}
    ppo = {"algorithm__name": "ppo", "algorithm__bootstrap_truncated": True}
    return {**JOB_CONFIG, **ppo, **critic, **settings}


@pytest.fixture(scope="module")
def critic_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other weights than the policy's, with as many layers."""
    return make_model(tmp_path_factory.mktemp("critic"), seed=1)


@pytest.fixture(scope="module")
def fsdp(model: Path, critic_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One rank, with a checkpoint after the second step."""
    out = tmp_path_factory.mktemp("fsdp")
    return run(1, model, out, steps=STEPS, save_after=2, config=job_config(critic_model))


@pytest.fixture(scope="module")
def pipelined(
    model: Path, critic_model: Path, fsdp: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Two ranks, fused; then from both checkpoints of the second step, and in parts."""
    out = tmp_path_factory.mktemp("pipelined")
    own, others = (folder / "checkpoints/step_000000002" for folder in (out, fsdp))
    then = [
        {"steps": STEPS[2:], "load": str(own), "out": str(out / "resumed"), "suspend_before": 4},
        {"steps": STEPS[2:], "load": str(others), "out": str(out / "moved")},
    ]
    config = job_config(critic_model, **PIPELINE)
    return run(2, model, out, steps=STEPS, save_after=2, then=then, config=config)


def test_a_fused_pipeline_trains_as_fsdp_does(fsdp: Path, pipelined: Path) -> None:
    """Losses, gradient norms and published weights; embeddings are shared by both ends."""
    found, expected = (json.loads((f / "metrics.json").read_text()) for f in (pipelined, fsdp))
    for mine, other in zip(found, expected, strict=True):
        assert mine.keys() == other.keys()
        for name in mine.keys() - {"packing", "computed_tokens"}:  # of the micro-batches
            assert mine[name] == pytest.approx(other[name], abs=ROUNDING), name
    assert greatest_difference(fsdp, pipelined) < ROUNDING
    assert same_rows(fsdp, pipelined)
    initial = load_file(fsdp / "checkpoints/step_000000002/rank_00000_of_00001.safetensors")
    assert losses(pipelined)[0] != losses(pipelined)[1]
    assert initial["parameter.critic.backbone.norm.weight"].std() > 0, "the critic learns"


def test_a_pipeline_resumes_bit_equal(pipelined: Path) -> None:
    """Loaded from the checkpoint of step 2, device state out and in before step 4."""
    assert losses(pipelined / "resumed") == losses(pipelined)[2:]
    assert greatest_difference(pipelined / "resumed", pipelined) == 0.0


def test_checkpoints_move_between_the_backends(
    model: Path, critic_model: Path, fsdp: Path, pipelined: Path, tmp_path: Path
) -> None:
    """Both ways, with optimizer state, and the critic's."""
    assert greatest_difference(pipelined / "moved", fsdp) < ROUNDING
    assert losses(pipelined / "moved") == pytest.approx(losses(fsdp)[2:], abs=ROUNDING)
    load = str(pipelined / "checkpoints/step_000000002")
    back = run(1, model, tmp_path, steps=STEPS[2:], load=load, config=job_config(critic_model))
    assert greatest_difference(back, fsdp) < ROUNDING
    assert losses(back) == pytest.approx(losses(fsdp)[2:], abs=ROUNDING)


def test_each_parameter_is_saved_by_one_rank(pipelined: Path) -> None:
    """So that a checkpoint is put together by names."""
    folder = pipelined / "checkpoints/step_000000002"
    names = [
        name
        for rank in range(2)
        for name in load_file(folder / f"rank_{rank:05d}_of_00002.safetensors")
        if name != "rng"
    ]
    assert len(names) == len(set(names))
    assert "parameter.model.embed_tokens.weight" in names


def test_replicas_of_a_critic_and_a_serial_schedule_train_the_same(
    model: Path, critic_model: Path, fsdp: Path, tmp_path: Path
) -> None:
    """The critic has one stage on each of two ranks; unfused, and padded instead of packed."""
    replicas = {"pipeline__critic_stages": 1, "pipeline__schedule": "serial"}
    config = job_config(critic_model, **PIPELINE, **replicas, batch__packing=False)
    out = run(2, model, tmp_path, steps=STEPS, config=config)
    assert losses(out) == pytest.approx(losses(fsdp), abs=ROUNDING)
    assert greatest_difference(out, fsdp) < ROUNDING


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_a_policy_without_a_critic_of_its_own_is_a_plain_pipeline(
    model: Path, tmp_path: Path, algorithm: str
) -> None:
    """No critic, and one that is a layer on the last stage; one rank is a pipeline too."""
    config = {**JOB_CONFIG, "algorithm__name": algorithm}
    whole = run(1, model, tmp_path / "whole", steps=[1, 2], config=config)
    num_ranks = 2 if algorithm == "ppo" else 1
    out = run(num_ranks, model, tmp_path / "out", steps=[1, 2], config={**config, **PIPELINE})
    assert losses(out) == pytest.approx(losses(whole), abs=ROUNDING)
    assert greatest_difference(out, whole) < ROUNDING


def test_device_state_moves_out_and_in(model: Path, critic_model: Path, tmp_path: Path) -> None:
    """In the type of the model's file too, whose memory is not the trainer's to release."""
    found = {}
    for name, extra in (("straight", {}), ("suspended", {"suspend_before": 2})):
        config = {**job_config(critic_model), **PIPELINE, "dtype": "float32"}
        found[name] = run(1, model, tmp_path / name, steps=[1, 2], config=config, **extra)
    assert greatest_difference(found["straight"], found["suspended"]) == 0.0


def test_bfloat16_keeps_float32_weights(model: Path, critic_model: Path, tmp_path: Path) -> None:
    """As under FSDP; updates below the resolution of bfloat16 add up, also after a resume."""
    rate = {"dtype": "bfloat16", "optimizer__learning_rate": 1e-6}
    config = {**job_config(critic_model), **rate}
    whole = run(1, model, tmp_path / "whole", steps=[1, 2], save_after=2, config=config)
    out = tmp_path / "out"
    again = {"steps": [2], "load": str(out / "checkpoints/step_000000001"), "out": str(out / "2")}
    run(2, model, out, steps=[1, 2], save_after=1, config={**config, **PIPELINE}, then=[again])
    found, expected = (json.loads((f / "metrics.json").read_text()) for f in (out, whole))
    for name in ("loss", "grad_norm", "critic_grad_norm"):
        assert found[0][name] == pytest.approx(expected[0][name], rel=0.03), name
    assert losses(out / "2") == losses(out)[1:]
    saved = load_file(out / "checkpoints/step_000000001/rank_00000_of_00002.safetensors")
    name = "model.embed_tokens.weight"
    moved = saved[f"parameter.{name}"] - load_file(model / "model.safetensors")[name]
    assert saved[f"parameter.{name}"].dtype == torch.float32
    assert 0 < moved.abs().max() < 2e-6


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lora__rank": 2}, "lora.rank is 2 with backend 'pipeline'"),
        ({"cpu_offload": True}, "cpu_offload is True with backend 'pipeline'"),
        ({"attention": "varlen"}, "attention is 'varlen' with backend 'pipeline'"),
        ({"pipeline__critic_stages": 2}, "critic_stages is 2 but critic is 'layer'"),
        (
            {"critic": "model", "pipeline__micro_batches_held": 1},
            "micro_batches_held is 1 but a rank has stages of two models",
        ),
        ({"backend": "fsdp", "pipeline__schedule": "serial"}, "but backend is 'fsdp'"),
    ],
)
def test_settings_that_a_pipeline_cannot_have_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    """Each error names the setting and a cure."""
    given = {"run_id": "r", "model": "m", "checkpoint__folder": "c", "backend": "pipeline"}
    with pytest.raises(ValueError, match=message):
        trainer_config(**{**given, **settings})


@pytest.mark.parametrize("algorithm", ["dpo", "tba"])
def test_losses_of_whole_groups_are_refused(model: Path, tmp_path: Path, algorithm: str) -> None:
    """They compare rollouts."""
    reference = {"algorithm__name": algorithm, "algorithm__reference_column": "ref_logprobs"}
    config = {**JOB_CONFIG, **reference, "backend": "pipeline"}
    with pytest.raises(ValueError, match=f"'{algorithm}', whose loss needs whole groups"):
        run(1, model, tmp_path, steps=[1], config=config)


def test_a_model_with_fewer_layers_than_ranks_is_refused(model: Path) -> None:
    """The message names the layers and what to change."""
    config = trainer_config(run_id="r", checkpoint__folder="c", model=model)
    with pytest.raises(ValueError, match="has 2 layers and cannot be cut into 3"):
        Stage(load_whole(config, model), 0, 3)
