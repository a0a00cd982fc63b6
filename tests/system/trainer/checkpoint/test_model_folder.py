"""A checkpoint as a plain Hugging Face folder is the model that the trainer had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from tests.lib.trainer.ranks.forked_ranks import run_forked
from tests.lib.trainer.ranks.gang_run import run_rank
from tests.lib.trainer.support import JOB_CONFIG, VOCABULARY, make_model
from trainer.checkpoint.model_folder import write_model_folder

LORA: dict[str, Any] = {"lora__rank": 4, "lora__targets": ["q_proj", "v_proj", "down_proj"]}
TOKEN_IDS = torch.arange(12)[None]


def untied(folder: Path) -> Path:
    """A model whose output embeddings are separate weights."""
    make_model(folder)
    config = Qwen3Config.from_pretrained(folder)
    config.tie_word_embeddings = False
    torch.manual_seed(1)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def trained(model: Path, out: Path, *, ranks: int = 1, **settings: Any) -> Path:
    """Train two steps; the checkpoint. `out` also holds what the trainer would publish."""
    config = {**JOB_CONFIG, **settings}
    job = {"config": config, "model": str(model), "out": str(out), "steps": [1, 2], "save_after": 2}
    if ranks == 1:
        run_rank(job)
    else:
        run_forked(ranks, run_rank, job)
    return out / "checkpoints/step_000000002"


def logits(model: torch.nn.Module) -> torch.Tensor:
    """Of some tokens."""
    with torch.no_grad():
        found: torch.Tensor = model(TOKEN_IDS).logits
    return found


def trainers_logits(base: Path, published: Path) -> torch.Tensor:
    """Of a model with the tensors that the trainer published."""
    tensors = load_file(published)
    dtype = next(iter(tensors.values())).dtype
    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}  # tied
    return logits(model)


@pytest.mark.parametrize(
    ("settings", "is_tied"),
    [({}, True), ({}, False), ({"dtype": "bfloat16"}, True), (LORA, True)],
    ids=["tied", "untied", "bfloat16", "lora"],
)
def test_the_folder_is_the_trainers_model(
    tmp_path: Path, settings: dict[str, Any], is_tied: bool
) -> None:
    """Every published tensor, bit for bit; transformers loads it to the same logits."""
    base = make_model(tmp_path / "base") if is_tied else untied(tmp_path / "base")
    checkpoint = trained(base, tmp_path / "run", **settings)
    folder = write_model_folder(checkpoint, base, tmp_path / "out")
    published = load_file(tmp_path / "run/weights.safetensors")
    written = load_file(folder / "model.safetensors")
    assert written.keys() == published.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in published.items())
    assert ("lm_head.weight" in written) is not is_tied
    dtype = next(iter(published.values())).dtype
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", local_files_only=True)
    assert loaded.dtype == dtype
    expected = trainers_logits(base, tmp_path / "run/weights.safetensors")
    assert torch.equal(logits(loaded), expected)
    # Negative control: the model before training gives others.
    before = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    assert not torch.allclose(logits(before), expected)
    assert len(AutoTokenizer.from_pretrained(folder)) == VOCABULARY


def test_shards_of_two_ranks_become_one_folder(tmp_path: Path) -> None:
    """As the ranks published it; a critic is left out."""
    base = make_model(tmp_path / "base")
    checkpoint = trained(base, tmp_path / "run", ranks=2, algorithm__name="ppo", **LORA)
    folder = write_model_folder(checkpoint, base, tmp_path / "out")
    published = load_file(tmp_path / "run/weights.safetensors")
    written = load_file(folder / "model.safetensors")
    assert written.keys() == published.keys()
    for name, tensor in published.items():
        # Merging multiplies on either side: in float64, to the last bits.
        torch.testing.assert_close(written[name], tensor, rtol=0, atol=1e-14)


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    """Each message names the cure, and nothing is left behind."""
    base = make_model(tmp_path / "base")
    checkpoint = trained(base, tmp_path / "run", **LORA)
    out = tmp_path / "out"
    with pytest.raises(ValueError, match="is not a checkpoint"):
        write_model_folder(tmp_path, base, out)
    with pytest.raises(ValueError, match="other weights"):
        write_model_folder(checkpoint, make_model(tmp_path / "other", seed=1), out)
    with pytest.raises(ValueError, match="does not name the model"):
        write_model_folder(checkpoint, None, out)
    whole = trained(base, tmp_path / "whole")
    with pytest.raises(ValueError, match=r"nothing for parameter lm_head.weight"):
        write_model_folder(whole, untied(tmp_path / "untied"), out)
    assert not out.exists()
    assert write_model_folder(checkpoint, base, out) == out
    with pytest.raises(ValueError, match="exists"):
        write_model_folder(checkpoint, base, out)
