"""Real answers of SmolLM2 to the prompts, by the embedded engine; kept, for they take long."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from rich.progress import Progress
from transformers import AutoTokenizer

from bench.real_lengths.prompts import drawn_prompts
from rollout.server.config import RolloutServerConfig
from rollout.server.engines.engine import EngineRequest, Sampling
from rollout.server.engines.torch.torch_engine import TorchEngine

_KEPT = Path(__file__).parents[2] / "runs" / "real_lengths"


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """A prompt and the lengths of its answers."""

    token_ids: list[int]
    """The prompt with the chat template."""
    num_tokens: int
    """Sampled tokens of the first one, the end-of-sequence token included."""
    lengths: tuple[int, ...]
    """Sampled tokens of each."""


def generations(
    model: Path, workload: Mapping[str, Any], seed: int, num_answers: int
) -> list[Generated]:
    """Answers to each prompt that is drawn; those of earlier calls are read again."""
    prompts = drawn_prompts(workload, seed)
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    ids = [_with_template(tokenizer, prompt) for prompt in prompts]
    facts = [model.name, workload["temperature"], workload["max_new_tokens"], seed, ids]
    digest = blake2b(json.dumps(facts).encode(), digest_size=8).hexdigest()
    kept = _KEPT / f"{digest}.jsonl"
    kept.parent.mkdir(parents=True, exist_ok=True)
    wanted = set(range(len(ids) * num_answers))
    if missing := sorted(wanted - set(_lengths(kept))):
        asyncio.run(_generate(model, ids, missing, workload, seed, kept))
    lengths = _lengths(kept)
    found = [
        tuple(lengths[i] for i in range(first, max(wanted) + 1, len(ids)))
        for first in range(len(ids))
    ]
    return [
        Generated(token_ids=each, num_tokens=of_it[0], lengths=of_it)
        for each, of_it in zip(ids, found, strict=True)
    ]


def _lengths(kept: Path) -> dict[int, int]:
    """Lengths by the answer's number, one in a line: prompt + prompts * (answers to it before)."""
    lines = kept.read_text(encoding="utf-8").splitlines() if kept.exists() else []
    return dict(json.loads(line) for line in lines)


async def _generate(
    model: Path,
    ids: Sequence[Sequence[int]],
    missing: Sequence[int],
    workload: Mapping[str, Any],
    seed: int,
    kept: Path,
) -> None:
    """Each length is written as soon as it is known: an interrupted call is continued."""
    limit = workload["max_new_tokens"]
    engine = TorchEngine(RolloutServerConfig(model=model, max_context=limit + max(map(len, ids))))
    await engine.start()
    with kept.open("a", encoding="utf-8") as file, Progress() as progress:
        bar = progress.add_task("answers", total=len(missing))

        async def one(number: int) -> None:
            sampling = Sampling(
                temperature=workload["temperature"], max_new_tokens=limit, seed=seed + number
            )
            length = await sampled_tokens(engine, ids[number % len(ids)], sampling)
            print(json.dumps([number, length]), file=file, flush=True)
            progress.advance(bar)

        await asyncio.gather(*map(one, missing))
    await engine.close()


async def sampled_tokens(engine: TorchEngine, ids: Sequence[int], sampling: Sampling) -> int:
    """Sample one answer and count its tokens."""
    request = EngineRequest(request_id="", token_ids=tuple(ids), sampling=sampling)
    return sum([len(chunk.token_ids) async for chunk in engine.generate(request)])


def _with_template(tokenizer: Any, prompt: str) -> list[int]:
    messages = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
