"""The workload of the generation drivers, and the protocol by which they are asked to run it.

A driver loads its model once and says `{"ready": true}`; then it answers each line, a case, with
`{"seconds": s}`, so that drivers take turns while all stay warm.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import TypeVar

M = TypeVar("M")
PROMPT_TOKENS = 12
MEDIAN_LENGTH, SIGMA, LONGEST = 32.0, 1.0, 512
UNIFORM_LENGTH = 64
FIRST_TOKEN, VOCABULARY = 4, 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Requests that arrive at once."""

    rows: int
    """Most of them that run at the same time."""
    prompts: list[list[int]]
    """Token ids, all of one length."""
    lengths: list[int]
    """Tokens to sample for each; no end-of-sequence id ends one early."""

    @property
    def tokens(self) -> int:
        """Tokens to sample in all."""
        return sum(self.lengths)


def make_case(rows: int, requests: int, tail: bool, seed: int, turn: int) -> Case:
    """Draw lengths: lognormal with a long tail, or all the same; and prompts, new in each `turn`.

    Nobody shall gain by what it cached of an earlier turn.
    """
    fresh = Random(f"{seed}:{turn}")
    prompts = [
        [fresh.randrange(FIRST_TOKEN, VOCABULARY) for _ in range(PROMPT_TOKENS)]
        for _ in range(requests)
    ]
    lengths = [UNIFORM_LENGTH] * requests
    if tail:
        random = Random(seed)
        drawn = [MEDIAN_LENGTH * random.lognormvariate(0.0, SIGMA) for _ in range(requests)]
        lengths = [max(1, min(LONGEST, int(length))) for length in drawn]
    return Case(rows=rows, prompts=prompts, lengths=lengths)


def serve(load: Callable[[Path, int], M], generate: Callable[[M, Case], None]) -> None:
    """Be a driver: answer cases from stdin until it closes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rows", type=int, required=True)
    arguments, _ = parser.parse_known_args()
    # What a library prints must not enter the answers.
    answers, sys.stdout = sys.stdout, sys.stderr
    model = load(arguments.model, arguments.rows)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        case = Case(**json.loads(line))
        began = time.perf_counter()
        generate(model, case)
        answer = {"seconds": time.perf_counter() - began}
        print(json.dumps(answer), file=answers, flush=True)


def as_line(case: Case) -> str:
    """What a driver reads."""
    return json.dumps(asdict(case)) + "\n"
