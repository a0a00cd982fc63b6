"""Weights that are read file by file, before all files of their version are there."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollout.server.config import RolloutServerConfig
from rollout.server.engines.engine import PauseMode, WeightsError
from rollout.server.engines.torch.llama import LlamaReader
from rollout.server.engines.torch.torch_engine import TorchEngine
from rollout.server.engines.torch.weight_reader import (
    ArrivingWeights,
    CheckedTensors,
    storages,
)
from tests.lib.rollout.server.support import collect, recompute, request, save_model


def in_files(model: Path, folder: Path, count: int = 4) -> list[Path]:
    """The weights of `model` in `count` files, in the order of their names."""
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    tensors = load_file(model / "model.safetensors")
    names = sorted(tensors, key=lambda name: ("layers" not in name, name))
    files = [folder / f"part-{number}.safetensors" for number in range(count)]
    for number, file in enumerate(files):
        mine = names[number * len(names) // count : (number + 1) * len(names) // count]
        save_file({name: tensors[name] for name in mine}, file)
    return files


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were read."""
    names: list[str] = []
    add = CheckedTensors.add

    def noted(self: CheckedTensors, file: Path) -> None:
        names.append(file.name)
        add(self, file)

    monkeypatch.setattr(CheckedTensors, "add", noted)
    return names


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "gpt2"])
async def test_files_are_read_once_and_used_at_the_update(
    tmp_path: Path, reads: list[str], architecture: str
) -> None:
    """While they arrive, in a folder that is renamed; nothing is loaded before the update."""
    old, new = (save_model(tmp_path / str(seed), architecture, seed) for seed in (1, 2))
    engine = TorchEngine(RolloutServerConfig(model=old, max_running=2, max_context=200))
    await engine.start()
    before = await collect(engine.generate(request()))
    files = in_files(new, tmp_path / "new.partial")
    for count in (1, 2, 3):
        await engine.prepare_files(files[:count])
    assert reads == [file.name for file in files[:3]]
    assert (await collect(engine.generate(request()))).logprobs == before.logprobs
    folder = (tmp_path / "new.partial").rename(tmp_path / "new")
    await engine.prepare_weights(folder)
    await engine.pause(PauseMode.RETRACT)
    await engine.update_weights(folder, 1)
    await engine.resume()
    assert reads == [file.name for file in files]
    output = await collect(engine.generate(request()))
    await engine.close()
    expected = recompute(new, (3, 4, 5), output.token_ids)
    assert output.logprobs == pytest.approx(expected.tolist(), abs=1e-4)


def changed(file: Path) -> None:
    """Write other numbers under the same name and size."""
    tensors = {name: tensor + 1 for name, tensor in load_file(file).items()}
    file.unlink()
    save_file(tensors, file)


def held(folder: Path, files: list[Path]) -> dict[str, torch.Tensor] | None:
    """Read `files`, then change one and take the folder."""
    tensors = {name: t for file in files for name, t in load_file(file).items()}
    expected = storages(tensors)
    arriving = ArrivingWeights()
    arriving.add(lambda: CheckedTensors(expected, torch.float32), files[:2])
    changed(files[0])
    return arriving.take(folder)


def test_a_file_that_was_replaced_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing read before it is: the folder is read anew. Without the check two versions mix."""
    files = in_files(save_model(tmp_path / "model"), tmp_path / "one")
    assert held(tmp_path / "one", files) is None
    # Negative control.
    files = in_files(tmp_path / "model", tmp_path / "other")
    monkeypatch.setattr(ArrivingWeights, "_are_among", lambda *_: True)
    monkeypatch.setattr(
        "rollout.server.engines.torch.weight_reader._identity",
        lambda file: (0, 0, 0, 0),
    )
    mixed = held(tmp_path / "other", files)
    assert mixed is not None
    now = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert any(not torch.equal(mixed[name], tensor) for name, tensor in now.items())


def test_what_is_read_of_a_version_that_is_given_up_is_dropped(
    tmp_path: Path, reads: list[str]
) -> None:
    """Files of the next version begin anew; those that were moved away are left for later."""
    one = in_files(save_model(tmp_path / "a", seed=1), tmp_path / "one")
    other = in_files(save_model(tmp_path / "b", seed=2), tmp_path / "other")
    tensors = {name: tensor for file in other for name, tensor in load_file(file).items()}
    expected, arriving = storages(tensors), ArrivingWeights()

    def begin() -> CheckedTensors:
        return CheckedTensors(expected, torch.float32)

    arriving.add(begin, one[:2])
    arriving.add(begin, other[:2])
    arriving.add(begin, [*other[:2], tmp_path / "gone.safetensors"])
    found = arriving.take(tmp_path / "other")
    assert found is not None
    assert {name: bool((found[name] == tensors[name]).all()) for name in tensors} == dict.fromkeys(
        tensors, True
    )
    assert len(reads) == 2 + 4
    assert arriving.take(tmp_path / "other") is None
    (tmp_path / "bad.safetensors").write_bytes(b"no weights")
    with pytest.raises(WeightsError, match=r"bad\.safetensors"):
        arriving.add(begin, [tmp_path / "bad.safetensors"])


async def test_no_layer_is_held_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of arranged layers the tensors are let go: those of an unfinished layer alone are kept."""
    kept: list[set[str]] = []
    add = LlamaReader.add

    def noted(self: LlamaReader, file: Path) -> None:
        add(self, file)
        names = {name.split(".")[2] for name in self._tensors.held if ".layers." in name}
        kept.append(names)

    monkeypatch.setattr(LlamaReader, "add", noted)
    old, new = (save_model(tmp_path / str(seed), "llama", seed) for seed in (1, 2))
    engine = TorchEngine(RolloutServerConfig(model=old, max_running=2, max_context=200))
    await engine.start()
    await engine.prepare_files(in_files(new, tmp_path / "new", 6))
    await engine.close()
    assert max(len(names) for names in kept) == 1
    assert kept[-1] == set()
