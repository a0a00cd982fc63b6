"""LoRA: frozen weights, a trained adapter, and what is published of both."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, inject_adapter_in_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from rollout.server.engines.engine import WeightsError
from rollout.server.weights.merge_lora import merge_lora
from tests.integration.rollout.server.weights.test_weight_cache import cache_of
from tests.lib.rollout.server.weights.weight_service import TinyWeightService
from tests.lib.trainer.ranks.forked_ranks import run_forked
from tests.lib.trainer.ranks.gang_run import run_rank
from tests.lib.trainer.support import (
    JOB_CONFIG,
    ROUNDING,
    changed,
    make_model,
    read_lines,
    trainer_config,
)
from tests.lib.trainer.training import Training
from tests.suites.field.tiny_models import make_config
from tests.suites.field.tiny_models import make_model as make_tiny
from trainer.checkpoint.resume import find_checkpoint
from trainer.config import TrainerConfig
from trainer.model.lora import (
    _check_injected,
    adapted_layers,
    adapter_settings,
    add_adapter,
    is_adapter,
    merged,
    plain_name,
    published_name,
)
from trainer.publish.weight_folder import write_folder
from trainer.tracking.tracker import Alarms

LORA: dict[str, Any] = {
    **JOB_CONFIG,
    "lora__rank": 4,
    "lora__targets": ["q_proj", "v_proj", "down_proj"],
}


def run(model: Path, out: Path, **job: Any) -> Path:
    """Train on this process as the only rank."""
    run_rank({"config": LORA, "model": str(model), "out": str(out), "steps": [1, 2, 3], **job})
    return out


@pytest.fixture(scope="module")
def straight(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps, a checkpoint after the first."""
    return run(model, tmp_path_factory.mktemp("straight"), save_after=1)


def settings(model: Path, **fields: Any) -> TrainerConfig:
    """Of a trainer with an adapter."""
    given: dict[str, Any] = {**LORA, **fields}
    return trainer_config(run_id="r", model=model, checkpoint__folder=Path("unused"), **given)


def test_only_adapted_layers_change(model: Path, straight: Path) -> None:
    """The published weights have the model's names; what has no adapter is as it was."""
    before, after = load_file(model / "model.safetensors"), weights_of(straight)
    changed = {name for name in before if not torch.equal(before[name].double(), after[name])}
    adapted = {
        name for name in before if any(f".{each}." in name for each in LORA["lora__targets"])
    }
    assert changed == adapted
    assert len(adapted) == 6
    assert after.keys() >= before.keys()


def test_a_checkpoint_holds_what_is_trained(straight: Path) -> None:
    """Adapters with their optimizer state, and none of the frozen weights."""
    [shard] = (straight / "checkpoints/step_000000001").glob("*.safetensors")
    names = load_file(shard).keys() - {"rng"}
    assert names
    assert all(".lora_" in name for name in names)


def test_a_resumed_run_is_the_same(model: Path, straight: Path, tmp_path: Path) -> None:
    """To the last bit."""
    load = str(straight / "checkpoints/step_000000001")
    again = weights_of(run(model, tmp_path, steps=[2, 3], load=load))
    straight_weights = weights_of(straight)
    assert all(torch.equal(tensor, again[name]) for name, tensor in straight_weights.items())


def test_two_ranks_compute_what_one_does(model: Path, straight: Path, tmp_path: Path) -> None:
    """Adapters are drawn alike on every rank, and gathered from all."""
    job = {"config": LORA, "model": str(model), "out": str(tmp_path), "steps": [1, 2, 3]}
    run_forked(2, run_rank, job)
    two = weights_of(tmp_path)
    for name, tensor in weights_of(straight).items():
        torch.testing.assert_close(two[name], tensor, rtol=0, atol=ROUNDING)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft asks transformers for an old name
@pytest.mark.parametrize("setting", [{}, {"cpu_offload": True}], ids=str)
def test_published_weights_compute_the_trainer_s_results(
    model: Path, straight: Path, tmp_path: Path, setting: dict[str, Any]
) -> None:
    """Adapter alone: peft's own sum of both, and a rollout server's, are the whole weights."""
    config = {**LORA, "publish__content": "adapter", **setting}
    out = run(model, tmp_path / "run", config=config)
    parts = load_file(out / "weights.safetensors")
    folder = tmp_path / "published"
    write_folder(
        folder, model, parts, adapter_settings(settings(model, publish__content="adapter"))
    )
    names = {path.name for path in folder.iterdir()}
    assert names == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "base.json",
        "manifest.json",
        ".complete",
    }
    whole = weights_of(straight)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    peft = PeftModel.from_pretrained(base, folder, autocast_adapter_dtype=False)
    assert_equal(dict(peft.merge_and_unload().named_parameters()), whole, atol=1e-12)
    # The model's own folder is in float32, and so is what a server makes of it.
    made = merge_lora(folder, model)
    assert_equal(load_file(made / "model.safetensors"), whole, atol=1e-6)
    assert merge_lora(folder, model) == made
    # Nothing is left of what it was made from.
    assert [path for path in folder.iterdir() if path.is_dir()] == [made]
    assert AutoModelForCausalLM.from_pretrained(made, local_files_only=True) is not None


def test_an_adapter_of_another_model_is_rejected(model: Path, tmp_path: Path) -> None:
    """By what does not fit; nothing is left that looks whole."""
    parts = {"base_model.model.model.layers.7.q_proj.lora_A.weight": torch.zeros(4, 16)}
    parts["base_model.model.model.layers.7.q_proj.lora_B.weight"] = torch.zeros(16, 4)
    write_folder(
        tmp_path, model, parts, adapter_settings(settings(model, publish__content="adapter"))
    )
    with pytest.raises(WeightsError, match=r"layers\.7.*another model"):
        merge_lora(tmp_path, model)
    assert not (tmp_path / "whole").exists()


def test_an_adapter_to_other_weights_is_rejected(
    model: Path, straight: Path, tmp_path: Path
) -> None:
    """Shapes are equal, so only the check notices. Nor does a run resume with another model."""
    other = make_model(tmp_path / "other", seed=1)
    config = settings(model, publish__content="adapter")
    folder = tmp_path / "published"
    parts = {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.zeros(4, 16)}
    write_folder(folder, model, parts, adapter_settings(config))
    with pytest.raises(WeightsError, match="belongs to other weights"):
        merge_lora(folder, other)
    config = changed(config, checkpoint__folder=straight / "checkpoints", resume=True)
    assert find_checkpoint(config, Alarms()) is not None
    with pytest.raises(ValueError, match="adapter for other weights"):
        find_checkpoint(config.replace(model=other), Alarms())


def test_an_adapter_of_other_layers_is_not_resumed(
    model: Path, straight: Path, tmp_path: Path
) -> None:
    """With fewer, what was trained would be lost without a word."""
    load = str(straight / "checkpoints/step_000000001")
    config = {**LORA, "lora__targets": ["q_proj", "v_proj"]}
    paths = {"model": str(model), "out": str(tmp_path), "load": load}
    job: dict[str, object] = {**paths, "config": config, "steps": []}
    with pytest.raises(ValueError, match=r"down_proj.*lora.targets"):
        run_rank(job)


async def test_a_rollout_server_fetches_an_adapter_and_loads_a_model(
    model: Path, tmp_path: Path
) -> None:
    """As it came it is kept for others; a whole one of an earlier life is made again."""
    adapted, parts = AutoModelForCausalLM.from_pretrained(model), {}
    add_adapter(adapted, settings(model))
    for name, parameter in adapted.named_parameters():
        if is_adapter(name):
            parts[published_name(name)] = torch.nn.init.normal_(parameter.data)
    published = tmp_path / "published"
    write_folder(
        published, model, parts, adapter_settings(settings(model, publish__content="adapter"))
    )
    for name in ("manifest.json", ".complete"):  # the weights service's own
        (published / name).unlink()
    service, token_ids = TinyWeightService(), torch.arange(12)[None]
    await service.publish(7, published)
    for _ in range(2):
        async with cache_of(service, tmp_path / "cache", base=model) as cache:
            fetched = await cache.fetch()
            assert fetched is not None
            loaded = AutoModelForCausalLM.from_pretrained(fetched.folder)
            with torch.no_grad():
                found, expected = loaded(token_ids).logits, adapted(token_ids).logits
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
            (fetched.folder / "config.json").write_text("what a crash of the machine left")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lora__targets": ("q_proj", "vproj")}, "lora.targets has 'vproj'.*use .*v_proj"),
        ({"lora__targets": ("lm_head",)}, "shares its weights with the input"),
        ({"lora__rank": 0}, "lora.targets is .* but lora.rank is 0"),
        (
            {"lora__rank": 0, "lora__targets": (), "publish__content": "adapter"},
            "publish.content is 'adapter' but lora.rank is 0",
        ),
        ({"lora__rank": -1}, "(?s)lora.rank.*greater than or equal to 0"),
    ],
    ids=str,
)
def test_invalid_adapter_settings_are_rejected(
    model: Path, fields: dict[str, Any], message: str
) -> None:
    """With the setting and the cure."""
    with pytest.raises(ValueError, match=message):
        add_adapter(AutoModelForCausalLM.from_pretrained(model), settings(model, **fields))


@pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")  # peft says how it adapts experts
def test_layers_that_were_not_chosen_are_noticed(model: Path) -> None:
    """Negative control: peft by itself takes the experts for the MLP of the dense layer."""
    config = settings(model, lora__targets=())
    experts = make_tiny(make_config("deepseek_v3"))
    chosen = adapted_layers(experts, config)
    given: Any = {**adapter_settings(config), "target_modules": list(chosen)}
    inject_adapter_in_model(LoraConfig(**given), experts, "default")
    with pytest.raises(ValueError, match=r"mlp\.experts.* instead of .*mlp\.down_proj"):
        _check_injected(experts, chosen)


def test_without_peft_its_extra_is_named(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the package to install."""
    monkeypatch.setitem(sys.modules, "peft", None)
    loaded = AutoModelForCausalLM.from_pretrained(model)
    with pytest.raises(ValueError, match=r"pip install 'seamflow\[lora\]'"):
        add_adapter(loaded, settings(model))


async def test_a_run_publishes_adapters(training: Training) -> None:
    """Through all services: each version is an adapter, small, and the steps are trained."""
    await training.begin(*(f"t{number}" for number in range(6)), max_staleness=2)
    await training.play(12)
    records = await training.train(2, lora__rank=2, publish__content="adapter")
    assert [record["weight_version"] for record in records] == [1, 2]
    assert len(read_lines(training.metrics_file)) == 2
    whole = (training.model / "model.safetensors").stat().st_size
    for folder in training.published():
        assert (folder / "adapter_model.safetensors").stat().st_size < whole
        assert not (folder / "model.safetensors").exists()


def weights_of(out: Path) -> dict[str, torch.Tensor]:
    """What the run gathered at its end."""
    return load_file(out / "weights.safetensors")


def assert_equal(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], *, atol: float
) -> None:
    """All tensors that both have; the output embeddings may be the input's."""
    assert found
    for name, tensor in found.items():
        torch.testing.assert_close(tensor.double(), expected[name], rtol=0, atol=atol)


def test_gpt2s_transposed_matrices_are_merged_and_not_published_alone(model: Path) -> None:
    """Its layers keep [in, out] where others keep [out, in]."""
    config = GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=16, n_positions=32)
    adapted = GPT2LMHeadModel(config).eval()  # type: ignore[no-untyped-call]
    targets = {"lora__targets": ("c_attn", "c_fc")}
    add_adapter(adapted, settings(model, **targets))
    for name, parameter in adapted.named_parameters():
        if is_adapter(name):
            torch.nn.init.normal_(parameter)
    parameters = dict(adapted.named_parameters())
    whole = GPT2LMHeadModel(config).eval()  # type: ignore[no-untyped-call]
    names = [name for name in parameters if not is_adapter(name)]
    tensors = {plain_name(name): merged(adapted, name, parameters.__getitem__) for name in names}
    whole.load_state_dict(tensors, strict=False)
    token_ids = torch.arange(12)[None]
    with torch.no_grad():
        torch.testing.assert_close(whole(token_ids).logits, adapted(token_ids).logits)
    with pytest.raises(ValueError, match="publish weights"):
        add_adapter(GPT2LMHeadModel(config), settings(model, publish__content="adapter", **targets))
