"""A checkpoint as a plain Hugging Face folder: weights, configuration, tokenizer.

`python -m trainer.checkpoint.model_folder CHECKPOINT OUT [--model FOLDER]` writes one.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import nn

from services.lib.weight_files.folder_names import fingerprint
from trainer import fsync_files
from trainer.checkpoint.checkpoint_files import Checkpoint, read_parameters, read_state
from trainer.checkpoint.own_files import verify
from trainer.config import TrainerConfig
from trainer.model.critic import is_critic
from trainer.model.load_model import DTYPES, checkpoint_tensors, load_whole
from trainer.model.lora import add_adapter, is_adapter, merged, plain_name
from trainer.object_path import Folder, place
from trainer.publish.weight_folder import write_folder

_CONFIG_EXIT = 78


def write_model_folder(checkpoint: Folder, base_model: Path | None, out: Path) -> Path:
    """Write the weights that the trainer had at `checkpoint` into the new folder `out`.

    An adapter is merged, a critic is left out; the type is that of the published weights. `out`
    appears when it is complete.

    Args:
        checkpoint: folder that a trainer of any number of ranks wrote.
        base_model: the model that the run started from; None: the checkpoint knows it.
        out: does not exist yet.

    Returns:
        `out`.

    Raises:
        ValueError: `checkpoint` is not one, or damaged; `base_model` is another model; `out`
            exists.
    """
    state = read_state(checkpoint)
    verify(checkpoint)
    if out.exists():
        raise ValueError(f"{out} exists: give a new folder")
    config = _config(state, base_model, checkpoint)
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    model = _model(config)
    tensors = dict(_weights(model, config, read_parameters(checkpoint), checkpoint))
    named = checkpoint_tensors(model, tensors)
    write_folder(partial, config.model, named, durable=False)
    for path in partial.iterdir():
        fsync_files.sync(path)
    partial.rename(out)
    fsync_files.sync(out.parent)
    return out


def _config(state: Checkpoint, base_model: Path | None, checkpoint: Folder) -> TrainerConfig:
    """The settings that decide how the parameters become weights."""
    model = base_model or (Path(state.model) if state.model else None)
    if model is None:
        raise ValueError(
            f"checkpoint {checkpoint} does not name the model that its run started from: give it"
        )
    lora = {
        name.partition(".")[2]: value
        for name, value in state.settings.items()
        if name.startswith("lora.")
    }
    settings = {
        "run_id": state.run_id,
        "model": model,
        "dtype": state.settings["dtype"],
        "lora": lora,
        "checkpoint": {"folder": "unused"},
    }
    config = TrainerConfig.model_validate(settings)
    if state.base and fingerprint(model) != state.base:
        raise ValueError(
            f"checkpoint {checkpoint} holds an adapter for other weights than those of {model}: "
            "give the model that the run started with"
        )
    return config


def _model(config: TrainerConfig) -> nn.Module:
    model = load_whole(config, config.model)
    if config.lora.rank:
        add_adapter(model, config)
    return model


def _weights(
    model: nn.Module,
    config: TrainerConfig,
    trained: Mapping[str, torch.Tensor],
    checkpoint: Folder,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers by name, as `Policy.published_tensors` gives them."""
    parameters = dict(model.named_parameters())
    _check(parameters, trained, config, checkpoint)

    def whole(name: str) -> torch.Tensor:
        return trained[name] if name in trained else parameters[name].detach()

    for name in parameters:
        if not is_adapter(name):
            yield plain_name(name), _published(merged(model, name, whole), config)
    persistent = model.state_dict()
    for name, buffer in model.named_buffers():
        if name in persistent:
            yield plain_name(name), _published(buffer, config)


def _published(tensor: torch.Tensor, config: TrainerConfig) -> torch.Tensor:
    return tensor.to(DTYPES[config.dtype] if tensor.is_floating_point() else tensor.dtype)


def _check(
    parameters: Mapping[str, nn.Parameter],
    trained: Mapping[str, torch.Tensor],
    config: TrainerConfig,
    checkpoint: Folder,
) -> None:
    expected = {
        name: parameter.shape
        for name, parameter in parameters.items()
        if is_adapter(name) or not config.lora.rank
    }
    found = {name: tensor.shape for name, tensor in trained.items() if not is_critic(name)}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise ValueError(
                f"checkpoint {checkpoint} holds {_shape(found.get(name))} for parameter {name}, "
                f"the model {config.model} has {_shape(expected.get(name))}: give the model that "
                "the run started from"
            )


def _shape(shape: torch.Size | None) -> str:
    return "nothing" if shape is None else str(tuple(shape))


def main() -> None:
    """Write the folder of the command line; a mistake is one line and exit code 78."""
    parser = argparse.ArgumentParser(
        prog="seamflow export-model", description=__doc__.partition("\n")[0]
    )
    parser.add_argument(
        "checkpoint", type=place, help="checkpoints/step_..., checkpoints/best, or a URL of a store"
    )
    parser.add_argument("out", type=Path, help="new folder")
    parser.add_argument("--model", type=Path, help="model that the run started from")
    given = parser.parse_args()
    try:
        out = write_model_folder(given.checkpoint, given.model, given.out)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(_CONFIG_EXIT)
    print(f"wrote a Hugging Face folder: {out.resolve()}")


if __name__ == "__main__":
    main()
