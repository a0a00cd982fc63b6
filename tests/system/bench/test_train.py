"""The measurement of whole training runs: what it counts, and that both sides do the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.quickstart.modes import WINDOW, Learning
from bench.train import learning, task, throughput
from bench.train.conversation import play
from bench.train.model import save_model
from bench.train.sides import ROOT, Window, read_config, speed, waits, watch
from bench.train.trl import as_arguments
from examples.quickstart import prepare
from services.chassis.config.load import load
from services.dataloader.config import DataloaderConfig
from services.launcher.config import LauncherConfig
from tests.lib.rendering import rendered_ids
from trainer.config import TrainerConfig

WINDOW_OF_TWO = Window(warm_up=1, steps=2)


def lines(count: int) -> list[dict[str, Any]]:
    """Metrics of a run whose steps take 2 s and grow by 100 tokens each."""
    return [{"step": n, "num_tokens": 100 * n, "time": 50.0 + 2 * n} for n in range(1, count + 1)]


def test_tokens_and_seconds_are_those_of_the_window() -> None:
    """From the end of the warm-up; the last step, which saves a checkpoint, is left out."""
    found = speed(lines(4), WINDOW_OF_TWO, cores=1.5)
    assert (found.tokens, found.seconds) == (200 + 300, 4.0)
    assert WINDOW_OF_TWO.in_all == 4
    figures = found.figures()
    assert figures["tokens_per_second"] == 125
    assert figures["cpu_seconds_per_1k_tokens"] == 1.5 * 4 / 0.5
    assert figures["seconds_per_step"] == 2


def test_a_run_that_ended_early_has_no_speed() -> None:
    """Nothing is extrapolated."""
    with pytest.raises(ValueError, match="ended early"):
        speed(lines(2), WINDOW_OF_TWO, cores=1.0)


def test_what_training_waited_for_is_a_share_of_the_window() -> None:
    """Publishing and the time after the last sample by the clock, packing by tokens."""
    told = [
        {
            **line,
            "seconds": {"publish": 0.01 * line["step"]},
            "seconds_after_last_sample": 0.5,
            "computed_tokens": 100 * line["step"],
            "packing": 1.0 if line["step"] == 2 else 1.5,
        }
        for line in lines(4)
    ]
    found = waits(told, WINDOW_OF_TWO)
    assert found["publish_stall_share"] == pytest.approx((0.02 + 0.03) / 4)
    assert found["after_last_sample_share"] == pytest.approx(1 / 4)
    assert found["packing"] == pytest.approx((200 + 450) / 500)


def test_a_process_is_watched_with_all_below_it(tmp_path: Path) -> None:
    """What a child of the command spends counts, and a command that fails says why."""
    metrics = tmp_path / "metrics.jsonl"
    code = f"""
import json, subprocess, sys, time
spend = "import time; end = time.time() + 1.5\\nwhile time.time() < end: pass"
child = subprocess.Popen([sys.executable, "-c", spend])
for step in range(1, 5):
    time.sleep(0.3)
    line = {{"step": step, "num_tokens": 10, "time": time.time()}}
    print(json.dumps(line), file=open({str(metrics)!r}, "a"), flush=True)
child.wait()
"""
    found = watch([sys.executable, "-c", code], {}, metrics, WINDOW_OF_TWO)
    assert found.tokens == 20
    assert found.cores > 0.05
    failing = [sys.executable, "-c", "raise SystemExit('no such model')"]
    with pytest.raises(RuntimeError, match="no such model"):
        watch(failing, {}, tmp_path / "none.jsonl", WINDOW_OF_TWO)


def test_ratios_are_of_neighbouring_runs() -> None:
    """Ours over TRL's, round by round: the median, and the range."""
    raw = {
        f"max{most}.{side}.tokens_per_second": samples
        for most in throughput.WORKLOADS
        for side, samples in (("seamflow", [10.0, 40.0, 90.0]), ("trl", [10.0, 20.0, 30.0]))
    }
    found = throughput.figures(raw, rounds=3)
    names = ("e2e_vs_trl_max64", "e2e_vs_trl_max64_lowest", "e2e_vs_trl_max64_highest")
    assert [found[name] for name in names] == [2, 1, 3]
    alone = {name: samples for name, samples in raw.items() if ".trl." not in name}
    assert not any("vs_trl" in name for name in throughput.figures(alone, rounds=3))


def run_of(to_target: int | None) -> Learning:
    """A run that succeeds always from so many seconds before its target on, or never."""
    success = [0.0] * 40
    if to_target is not None:
        success[to_target - WINDOW :] = [1.0] * (len(success) - to_target + WINDOW)
    return Learning(seconds=[float(n) for n in range(1, 41)], success=success, nodes={})


def test_each_side_is_compared_at_its_best_rate() -> None:
    """Reaching the target with every seed goes before speed; pairs are of one seed."""
    ours = {1e-4: [run_of(20)] * 3, 2e-4: [run_of(10), run_of(11), run_of(12)]}
    theirs = {1e-4: [run_of(30)] * 3, 2e-4: [run_of(8), run_of(8), run_of(None)]}
    assert learning.best_rate(theirs) == 1e-4
    found = learning.figures({"seamflow": ours, "trl": theirs})
    assert found["seamflow.learning_rate"] == 2e-4
    to_target = [each.to_target for each in ours[2e-4]]
    assert found["seconds_to_target_vs_trl"] == theirs[1e-4][0].to_target / to_target[1]
    assert found["pairs_that_reached_the_target"] == 3


def test_too_few_pairs_are_no_comparison() -> None:
    """A side that did not learn is not given a ratio."""
    runs = {"seamflow": {1e-4: [run_of(10)] * 3}, "trl": {1e-4: [run_of(10)] * 2 + [run_of(None)]}}
    found = learning.figures(runs)
    assert "seconds_to_target_vs_trl" not in found
    assert found["trl.seeds_that_reached_the_target"] == 2


def test_the_workloads_differ_in_their_limit_alone(tmp_path: Path) -> None:
    """Same sums, in the same order."""
    files = [
        task.write_tasks(tmp_path / f"{most}.jsonl", count=20, max_new_tokens=most, seed=3)
        for most in throughput.WORKLOADS
    ]
    short, long = (task.payloads(file) for file in files)
    assert [each["terms"] for each in short] == [each["terms"] for each in long]
    assert {each["max_new_tokens"] for each in long} == {256}


def test_only_the_right_sum_is_a_success() -> None:
    """Digits pay, or no group would have any variance."""
    payload = {"terms": [45, 7], "max_new_tokens": 64}
    assert task.user_message(payload) == "4 5 + 7 ="
    assert task.score(payload, "5 2") == (1.0, True)
    assert task.score(payload, "5 2 2") == (0.5, False)
    assert task.score(payload, "5 w1 + 2") == (0.25, False)
    assert task.score(payload, "") == (0.0, False)


def test_the_model_can_be_asked_all_of_the_task(tmp_path: Path) -> None:
    """Its tokenizer has every word, and ends messages as the model's configuration says."""
    from transformers import AutoTokenizer

    folder = save_model(tmp_path / "model", seed=0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    asked = [{"role": "user", "content": "4 5 + 7 ="}]
    ids = rendered_ids(tokenizer, asked, add_generation_prompt=True)
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.eos_token_id in ids
    config = json.loads((folder / "config.json").read_text())
    assert (config["eos_token_id"], config["vocab_size"]) == (
        tokenizer.eos_token_id,
        len(tokenizer),
    )


def test_the_configuration_of_our_side_is_one() -> None:
    """Every table is valid, and TRL reads its batch from it."""
    file = "bench/workloads/train.toml"
    given = ["--config", str(ROOT / file), "--model", "m", "--tasks", "t"]
    config = load(LauncherConfig, "launcher", given)
    assert config.group_size * config.groups_per_step == 64
    assert config.max_staleness < throughput.WARM_UP_STEPS
    run = ["--config", str(ROOT / file), "--run-id", "r"]
    load(TrainerConfig, "trainer", [*run, "--model", "m", "--checkpoint.folder", "c"])
    load(DataloaderConfig, "dataloader", [*run, "--tasks", "t"])
    assert throughput.threads("trainer") == read_config(file)["trainer"].get("threads", 1)


def test_trl_plays_the_conversation_that_the_agent_has() -> None:
    """Both turns are one sequence; the sampled tokens alone are trained; a cut answer is ended."""
    tokenizer = prepare.build_tokenizer()
    texts = iter(["13 14 <eos>", "13 <eos>", "13 14", "13 <eos>"])
    answers = [tokenizer.convert_tokens_to_ids(text.split()) for text in texts]
    turns = iter([[answers[0], answers[2]], [answers[1], answers[3]]])
    trainer = SimpleNamespace(
        processing_class=tokenizer,
        num_generations=2,
        _generate_single_turn=lambda *_: (next(turns), None),
    )
    asked = [{"role": "user", "content": f"at {floors}"} for floors in ("12 up to 14", "14 down")]
    found = play([asked, asked], trainer)
    whole = [
        asked[0],
        {"role": "assistant", "content": "13 14"},
        asked[1],
        {"role": "assistant", "content": "13"},
    ]
    rendered = rendered_ids(tokenizer, whole)
    for prompt, completion in zip(found["prompt_ids"], found["completion_ids"], strict=True):
        assert prompt + completion == rendered
    assert found["answers"] == [["13 14", "13"]] * 2
    assert found["num_sampled"] == [5, 4]
    for completion, mask in zip(found["completion_ids"], found["env_mask"], strict=True):
        assert len(completion) == len(mask)
        assert mask[0] == mask[-1] == 1


def test_flags_are_written_as_programs_read_them() -> None:
    """Names of Python, names of a command line."""
    assert as_arguments(max_new_tokens=64, seed=0) == ["--max-new-tokens", "64", "--seed", "0"]


def test_the_rewards_load_where_nothing_of_ours_is_installed() -> None:
    """TRL's environment has neither grpc nor our SDK."""
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('grpc', 'seamflow', 'torch', 'rich')))\n"
        "import bench.train.conversation, bench.train.task, examples.quickstart.task"
    )
    subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, check=True)
