"""What each rank reads of a folder is its rows of the model that transformers loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from services.lib.transformer.load_causal import load_causal
from tests.suites.models.architectures import ARCHITECTURES
from trainer.model import load_slices
from trainer.model.load_model import checkpoint_tensors
from trainer.model.load_slices import empty_causal, fill, folder_tensors

TRAINED = [name for name, each in ARCHITECTURES.items() if each.trains]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where each architecture gets its folder."""
    return tmp_path_factory.mktemp("zoo")


def made(name: str, folders: Path) -> Path:
    """The folder of an architecture."""
    folder = folders / name
    if not folder.exists():
        ARCHITECTURES[name].make(folder, seed=1)
    return folder


def rows_of(folder: Path, part: int, num_parts: int) -> tuple[Any, dict[str, torch.Tensor]]:
    """A model of which this rank has the rows that `torch.chunk` gives it."""
    whole, held = empty_causal(folder, torch.float32), empty_causal(folder, torch.float32)
    seen: dict[int, nn.Parameter] = {}
    for module in held.modules():
        for last, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in seen:
                    seen[id(parameter)] = nn.Parameter(chunk_of(parameter, part, num_parts))
                module._parameters[last] = seen[id(parameter)]
    fill(dict(folder_tensors(held, whole)), whole, folder, part=part, num_parts=num_parts)
    return whole, {name: each.detach() for name, each in held.named_parameters()}


def chunk_of(tensor: torch.Tensor, part: int, num_parts: int) -> torch.Tensor:
    """Memory for a part, as FSDP cuts; as many NaN."""
    chunks = tensor.chunk(num_parts)
    like = chunks[part] if part < len(chunks) else chunks[0][:0]
    return torch.full(like.shape, torch.nan)


@pytest.mark.parametrize("name", TRAINED)
def test_the_parts_together_are_the_whole(name: str, folders: Path) -> None:
    """Of one rank and of three, to the last bit; names of the folder are kept for publishing."""
    folder = made(name, folders)
    expected = load_causal(folder, torch.float32)
    parameters = dict(expected.named_parameters())
    for num_parts in (1, 3):
        parts = [rows_of(folder, part, num_parts) for part in range(num_parts)]
        assert parts[0][1].keys() == parameters.keys()
        for parameter, tensor in parameters.items():
            assert torch.cat([part[parameter] for _, part in parts]).equal(tensor.detach())
        published = checkpoint_tensors(parts[0][0], dict(parameters))
        assert published.keys() == checkpoint_tensors(expected, dict(parameters)).keys()
    buffers = dict(parts[0][0].named_buffers())
    assert buffers.keys() == dict(expected.named_buffers()).keys()
    for buffer, tensor in expected.named_buffers():
        assert buffers[buffer].equal(tensor)


def test_a_folder_without_some_weights_is_refused(folders: Path, tmp_path: Path) -> None:
    """By name, and not filled with random numbers."""
    folder = made("qwen3", folders)
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        ValueError, match=r"has no weights for model\.layers\.1\.mlp\.up_proj\.weight"
    ):
        rows_of(tmp_path, 0, 2)


def test_weights_of_another_size_are_refused(folders: Path, tmp_path: Path) -> None:
    """Such as those of a larger model beside this one's configuration."""
    folder = made("qwen3", folders)
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.zeros(7)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"model\.norm\.weight"):
        rows_of(tmp_path, 0, 1)


class Watched:
    """An entry of a folder that notes when it is read."""

    def __init__(self, name: str, entry: Any, read: set[str]) -> None:
        self._name, self._entry, self._read = name, entry, read

    def __getitem__(self, key: Any) -> torch.Tensor:
        """Its numbers."""
        self._read.add(self._name)
        tensor: torch.Tensor = self._entry[key]
        return tensor

    def __getattr__(self, name: str) -> Any:
        """Shape and type, which are in the file's head."""
        return getattr(self._entry, name)


def test_of_a_folder_only_what_is_wanted_is_read(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a stage of a pipeline wants the weights of its layers alone."""
    read: set[str] = set()
    slices = load_slices._slices
    monkeypatch.setattr(
        load_slices,
        "_slices",
        lambda *given: {name: Watched(name, e, read) for name, e in slices(*given).items()},
    )
    folder, prefix = made("qwen3", folders), "model.layers.1."
    whole, held = empty_causal(folder, torch.float32), load_causal(folder, torch.float32)
    wanted = {
        name: torch.full_like(each, torch.nan)
        for name, each in held.state_dict().items()
        if name.startswith(prefix)
    }
    fill(wanted, whole, folder)
    assert read == wanted.keys()
    assert all(tensor.equal(held.state_dict()[name]) for name, tensor in wanted.items())
