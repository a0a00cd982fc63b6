"""What another server's parsers of tool calls say: runs in an environment with its package alone.

.venv-parsers/bin/python tests/suites/parsers/judge.py sglang < answers.jsonl > verdicts.jsonl

Takes lines {"format", "text", "tools"}, gives lines {"calls": [[name, arguments]], "content"}, or
{"error"}. Only the files of the parsers are run: what they import of the server's own is
replaced by classes that keep what they are given, so neither torch nor a GPU is needed.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import logging
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SGLANG = {
    "deepseek_v3": "deepseekv3_detector:DeepSeekV3Detector",
    "deepseek_v31": "deepseekv31_detector:DeepSeekV31Detector",
    "hermes": "hermes_detector:HermesDetector",
    "llama3": "llama32_detector:Llama32Detector",
    "mistral": "mistral_detector:MistralDetector",
    "mistral_args": "mistral_detector:MistralDetector",
    "qwen3_coder": "qwen3_coder_detector:Qwen3CoderDetector",
}
VLLM = {
    "deepseek_v3": "deepseekv3_tool_parser:DeepSeekV3ToolParser",
    "deepseek_v31": "deepseekv31_tool_parser:DeepSeekV31ToolParser",
    "hermes": "hermes_tool_parser:Hermes2ProToolParser",
    "llama3": "llama_tool_parser:Llama3JsonToolParser",
}
MARKERS = (
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "<｜tool▁calls▁begin｜>"),
    *("<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
)


class Kept(types.SimpleNamespace):
    """A class of the server: an object keeps what it is made with."""

    def __init__(self, *_: Any, **fields: Any) -> None:
        super().__init__(**fields)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


class Settings:
    """Settings of the server, all of them on."""

    def __getattr__(self, name: str) -> Any:
        return types.SimpleNamespace(get=lambda: True)


class Other(types.ModuleType):
    """A module of the server that is not run; it has any class, and functions that do nothing."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "envs":
            return Settings()
        if name.isupper():
            return 1
        if name == "init_logger":
            return logging.getLogger
        return type(name, (Kept,), {}) if name[0].isupper() else lambda *_, **__: None


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of a server, but for those in `real`."""

    def __init__(self, package: str, real: str) -> None:
        self._package, self._real = package, real

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Its own modules alone."""
        if self._real and (name == self._real or name.startswith(f"{self._real}.")):
            return None
        if name == self._package or name.startswith(f"{self._package}."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        """One that has any class."""
        return Other(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing is run."""


class Vocabulary:
    """A tokenizer as far as parsers look at it: the markers are tokens."""

    def get_vocab(self) -> dict[str, int]:
        """Ids of the markers."""
        return {marker: index for index, marker in enumerate(MARKERS)}

    def encode(self, text: str, **_: Any) -> list[int]:
        """The id of a marker."""
        return [MARKERS.index(text)] if text in MARKERS else []


def loaded(package: str, folder: str, where: str) -> Any:
    """The class `where` of the folder of a package, without running the package itself."""
    real = f"{package}.{folder}"
    if real not in sys.modules:
        root = importlib.util.find_spec(package.partition(".")[0])
        assert root is not None and root.submodule_search_locations
        parts = [*package.split(".")[1:], *folder.split(".")]
        path = Path(root.submodule_search_locations[0], *parts)
        own = package.partition(".")[0]
        sys.meta_path[:0] = [Finder(own, real), Finder("transformers", "")]
        parent = types.ModuleType(real)
        parent.__path__ = [str(path)]
        sys.modules[real] = parent
    module, _, name = where.partition(":")
    return getattr(importlib.import_module(f"{real}.{module}"), name)


def by_sglang(kind: str, text: str, tools: Sequence[Any]) -> dict[str, Any]:
    """The verdict of SGLang's detector of a format."""
    detector = loaded("sglang.srt", "function_call", SGLANG[kind])()
    shown = [
        types.SimpleNamespace(type="function", function=types.SimpleNamespace(**t["function"]))
        for t in tools
    ]
    found = detector.detect_and_parse(text, shown)
    calls = [[call.name, json.loads(call.parameters or "{}")] for call in found.calls]
    return {"calls": calls, "content": found.normal_text}


def by_vllm(kind: str, text: str, tools: Sequence[Any]) -> dict[str, Any]:
    """The verdict of vLLM's parser of a format."""
    parser = loaded("vllm", "tool_parsers", VLLM[kind])(Vocabulary())
    found = parser.extract_tool_calls(text, Kept(tools=tools, tool_choice="auto"))
    calls = [[c.function.name, json.loads(c.function.arguments)] for c in found.tool_calls]
    return {"calls": calls, "content": found.content or ""}


JUDGES = {"sglang": (by_sglang, SGLANG), "vllm": (by_vllm, VLLM)}


def main() -> None:
    """Judge the lines of standard input."""
    logging.disable(logging.CRITICAL)
    judge, formats = JUDGES[sys.argv[1]]
    for line in sys.stdin:
        given = json.loads(line)
        verdict: dict[str, Any] | None = None
        if given["format"] in formats:
            try:
                verdict = judge(given["format"], given["text"], given["tools"])
            except Exception as error:
                verdict = {"error": f"{type(error).__name__}: {error}"[:200]}
        print(json.dumps(verdict), flush=True)


if __name__ == "__main__":
    main()
