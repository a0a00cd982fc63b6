"""`make test-parsers`: our parsers of tool calls beside SGLang's and vLLM's.

Each format has `ANSWERS` generated answers, each also cut at `CUTS` places. Calls and content are
compared; a difference that is not listed with its reason (differences.py) is a fault, and so is an
undamaged answer of which we make other calls than were written. Then answers of up to
256,000 characters, made of markers, are timed. `--record` renews what `make test` compares with.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from pathlib import Path

from bench.report import RESULTS, Report
from tests.suites.parsers.answers import FORMATS, Asked, asked
from tests.suites.parsers.differences import differs, is_right, listed
from tests.suites.parsers.verdicts import JUDGES, Verdict, by_judge, ours

BENCH = "test-parsers"
ANSWERS, CUTS = 500, 20
RECORDED = Path(__file__).with_name("recorded.json")
"""Verdicts of the judges on few answers, for where their environment is not installed."""
LENGTHS = (64_000, 128_000, 256_000)
REPEATED = {
    "deepseek_v31": "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
    "hermes": '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
    "llama3": '{"name": ',
    "mistral": "[TOOL_CALLS][]</s>",
    "mistral_args": "[TOOL_CALLS]f[ARGS]{}",
    "qwen3_coder": "<tool_call><function=f><parameter=a>",
}


def recorded_questions(name: str) -> list[Asked]:
    """The questions whose verdicts are recorded."""
    return list(asked(name, 12, 4, 1))


def faults(
    judge: str, questions: list[Asked], verdicts: list[Verdict | None], kinds: Counter[str]
) -> list[str]:
    """Differences that are not listed; the listed ones are counted in `kinds`."""
    found = []
    for each, theirs in zip(questions, verdicts, strict=True):
        mine = ours(each)
        if theirs is None or not differs(mine, theirs):
            continue
        kind = listed(judge, each, mine, theirs)
        kinds[kind or "unlisted"] += 1
        if not kind:
            found.append(f"{judge} {each}: ours {mine}, theirs {theirs}")
    return found


def main() -> None:
    """Compare all, print and write the figures; exit 1 if one differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--answers", type=int, default=ANSWERS)
    parser.add_argument("--record", action="store_true")
    given = parser.parse_args()
    if given.record:
        _record()
        return
    figures, found = _compared(given.answers, given.seed)
    report = Report(bench=BENCH, figures=figures | _times(), seeds=[given.seed])
    report.publish(RESULTS) if given.answers == ANSWERS else report.show()
    for each in found[:20]:
        print(each[:1000])
    raise SystemExit(1 if found else 0)


def _compared(number: int, seed: int) -> tuple[dict[str, float], list[str]]:
    kinds: Counter[str] = Counter()
    found: list[str] = []
    num_questions = num_verdicts = 0
    for name in FORMATS:
        questions = list(asked(name, number, CUTS, seed))
        num_questions += len(questions)
        found += [f"not as written: {each}" for each in questions if not is_right(each, ours(each))]
        for judge in JUDGES:
            verdicts = by_judge(judge, questions)
            num_verdicts += sum(verdict is not None for verdict in verdicts)
            found += faults(judge, questions, verdicts, kinds)
    figures: dict[str, float] = {
        "formats": len(FORMATS),
        "answers": num_questions,
        "verdicts": num_verdicts,
        "unlisted": len(found),
    }
    return figures | {f"listed.{name}": n for name, n in sorted(kinds.items())}, found


def _times() -> dict[str, float]:
    """Seconds for answers of each length, and how many times longer four times the text takes."""
    seconds = {}
    for name, part in REPEATED.items():
        for length in LENGTHS:
            text = part * (length // len(part))
            began = time.process_time()
            ours(Asked(name, text, None))
            seconds[f"seconds.{name}.{length}"] = round(time.process_time() - began, 3)
    return seconds


def _record() -> None:
    verdicts = {
        judge: {name: by_judge(judge, recorded_questions(name)) for name in FORMATS}
        for judge in JUDGES
    }
    RECORDED.write_text(json.dumps(verdicts, ensure_ascii=False, indent=0) + "\n", "utf-8")


if __name__ == "__main__":
    main()
