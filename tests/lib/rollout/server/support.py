"""Tiny models made on the spot, engines on them, and ways to read their streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rollout.server.engines.engine import (
    Chunk,
    Engine,
    EngineRequest,
    FinishReason,
    PauseMode,
    Sampling,
    VersionSource,
)

VOCAB = 64
EOS = 1


def _qwen3() -> torch.nn.Module:
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.1,
        eos_token_id=EOS,
        bos_token_id=2,
        pad_token_id=0,
    )
    return Qwen3ForCausalLM(config)


def _llama() -> torch.nn.Module:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        initializer_range=0.1,
        eos_token_id=EOS,
        bos_token_id=2,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def _gpt2() -> torch.nn.Module:
    config = GPT2Config(
        vocab_size=VOCAB,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=500,
        initializer_range=0.1,
        eos_token_id=EOS,
        bos_token_id=2,
        pad_token_id=0,
    )
    return GPT2LMHeadModel(config)


ARCHITECTURES: dict[str, Callable[[], torch.nn.Module]] = {
    "qwen3": _qwen3,
    "llama": _llama,
    "gpt2": _gpt2,
}


def save_model(folder: Path, architecture: str = "qwen3", seed: int = 0) -> Path:
    """Save a tiny model with random weights of `seed`, and a tokenizer, into `folder`."""
    torch.manual_seed(seed)
    ARCHITECTURES[architecture]().save_pretrained(folder)  # type: ignore[operator]
    vocabulary = {f"t{index}": index for index in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="t0"))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="t1")  # type: ignore[no-untyped-call]
    fast.save_pretrained(folder)
    return folder


@dataclass
class Output:
    """Everything one stream gave."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    sources: set[VersionSource] = field(default_factory=set)
    finish: FinishReason | None = None

    def add(self, chunk: Chunk) -> None:
        """Append a chunk, checking what must hold for every one."""
        assert self.finish is None, "a chunk came after the last one"
        assert len(chunk.token_ids) == len(chunk.logprobs)
        assert chunk.token_ids or chunk.finish is not None
        self.token_ids += chunk.token_ids
        self.logprobs += chunk.logprobs
        self.versions += [chunk.weight_version] * len(chunk.token_ids)
        self.sources.add(chunk.version_source)
        self.finish = chunk.finish


def request(prefix: tuple[int, ...] = (3, 4, 5), **sampling: object) -> EngineRequest:
    """A request that samples exactly `max_new_tokens` by default."""
    defaults: dict[str, object] = {"ignore_eos": True, "max_new_tokens": 32, "seed": 7}
    return EngineRequest(
        request_id="test",
        token_ids=prefix,
        sampling=Sampling(**(defaults | sampling)),  # type: ignore[arg-type]
    )


async def collect(stream: AsyncIterator[Chunk], into: Output | None = None) -> Output:
    """Read a stream to its end."""
    output = into or Output()
    async for chunk in stream:
        output.add(chunk)
    return output


async def interrupted(
    engine: Engine, wanted: EngineRequest, mode: PauseMode, times: int
) -> tuple[Output, int]:
    """Run `wanted`, pausing after each of the first chunks; return it and the number of pauses."""
    output, pauses = Output(), 0
    stream = engine.generate(wanted)
    async for chunk in stream:
        output.add(chunk)
        if pauses < times and chunk.finish is None:
            await engine.pause(mode)
            pauses += 1
            await engine.resume()
    return output, pauses


async def settle() -> None:
    """Let callbacks that are already scheduled run."""
    for _ in range(10):
        await asyncio.sleep(0)


def recompute(
    folder: Path, prefix: Sequence[int], output: Sequence[int], temperature: float = 1.0
) -> torch.Tensor:
    """Return the log-probs of `output` after `prefix` by one plain transformers forward pass."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([[*prefix, *output]])).logits[0, len(prefix) - 1 : -1]
    logprobs = (logits / (temperature or 1.0)).log_softmax(-1)
    chosen: torch.Tensor = logprobs.gather(1, torch.tensor(output)[:, None])[:, 0]
    return chosen
