"""Metadata of a model folder and of a server on it; the model is not loaded here."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from rollout.server.engines.engine import EngineInfo, WeightsError
from services.lib.model_files.end_ids import end_ids
from services.lib.model_files.model_folder import check_model_folder
from services.lib.model_files.quantization import is_mxfp4
from services.lib.model_files.weight_headers import read_headers
from services.lib.routed_experts import RoutingShape, routing_shape

Shapes = dict[str, list[int]]


class ModelFolder:
    """The Hugging Face folder a run starts from: its vocabulary, and the shapes of its weights."""

    def __init__(self, folder: Path) -> None:
        """Raises `ValueError` for a folder that cannot be trained."""
        check_model_folder(folder)
        self.folder = folder.resolve()
        config = _read_json(folder / "config.json")
        if is_mxfp4(config):
            raise ValueError(
                f"model {folder}: its experts are mxfp4, and SGLang keeps them so: it could not "
                "take trained weights, which are bfloat16; give a folder in bfloat16, which "
                "from_pretrained(…, quantization_config=Mxfp4Config(dequantize=True)) and "
                "save_pretrained() write"
            )
        text = config.get("text_config", config)
        self.vocab_size = int(text["vocab_size"])
        self.eos_token_ids = tuple(sorted(end_ids(folder)))
        tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
        self.routing = routing_shape(text)
        """How its routers choose experts; None: it has none."""
        self._optional = {"lm_head.weight"} if tied else set()
        self.num_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        """Of its weights, as they are stored."""
        try:
            self._shapes = _shapes(folder)
        except WeightsError as error:
            raise ValueError(str(error)) from error

    def check(self, folder: Path) -> None:
        """Raise `WeightsError` unless `folder` holds whole files of just this model's tensors.

        A load that fails half-way leaves SGLang with weights of two versions, so it is not begun.
        The files are also brought into the page cache.
        """
        given = _shapes(folder)
        for name, shape in given.items():
            if name not in self._shapes and name not in self._optional:
                raise WeightsError(f"{folder}: the model has no {name}")
            expected = self._shapes.get(name, shape)
            if shape != expected:
                raise WeightsError(f"{folder}: {name} has shape {shape}, the model's is {expected}")
        missing = sorted(self._shapes.keys() - given.keys() - self._optional)
        if missing:
            raise WeightsError(f"{folder}: has no {missing[0]}, nor {len(missing) - 1} more")


def describe(model: ModelFolder, server: dict[str, Any]) -> EngineInfo:
    """Return the constants of `server`, the answer of /server_info."""
    features = {"release_memory", "pause_in_place", "restart"}
    if server["enable_deterministic_inference"]:
        features.add("seed")
    return EngineInfo(
        name="sglang",
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        # SGLang refuses longer prompts, a few tokens before its context ends.
        max_context=server["max_req_input_len"],
        max_running=server["max_running_requests"],
        features=frozenset(features),
    )


def recorded_routing(model: ModelFolder, server: dict[str, Any]) -> RoutingShape:
    """How the routers choose whose choices `server` reports.

    Raises:
        ValueError: there are none, or the server has not been started to report them.
    """
    if model.routing is None:
        raise ValueError(
            f"record_routed_experts is true, but model {model.folder} has no routed experts: "
            "set it to false"
        )
    if not server.get("enable_return_routed_experts"):
        raise ValueError(
            "record_routed_experts is true, but the SGLang at sglang_url does not return them: "
            "start it with --enable-return-routed-experts"
        )
    return model.routing


def num_ranks(server: dict[str, Any]) -> int:
    """Return how many processes hold the weights between them: tensor times pipeline parallel."""
    return int(server.get("tp_size", 1)) * int(server.get("pp_size", 1))


def _shapes(folder: Path) -> Shapes:
    """By name, of whole files, whose content the kernel reads ahead."""
    if not folder.is_dir():
        raise WeightsError(f"{folder}: no such folder")
    try:
        headers = read_headers(folder)
        for file in {header.file for header in headers.values()}:
            with file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
    except (OSError, ValueError) as error:
        raise WeightsError(str(error)) from error
    return {name: list(header.shape) for name, header in headers.items()}


def _read_json(file: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    return content
