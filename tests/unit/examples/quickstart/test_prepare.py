"""The quickstart's tokenizer, model and supervised warm start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.quickstart import prepare, task
from tests.lib.deploy.support import content
from tests.lib.rendering import rendered_ids

MESSAGES = [
    {"role": "user", "content": "at 12 up to 14"},
    {"role": "assistant", "content": "13 14"},
    {"role": "user", "content": "down to 13"},
]


def test_the_chat_template_only_appends() -> None:
    """Rendering one more message extends the text, also from the generation prompt on."""
    tokenizer = prepare.build_tokenizer()

    def text(count: int, generation: bool) -> str:
        rendered = tokenizer.apply_chat_template(
            MESSAGES[:count], tokenize=False, add_generation_prompt=generation
        )
        assert isinstance(rendered, str)
        return rendered

    assert text(2, False).startswith(text(1, True))
    assert text(3, True).startswith(text(2, False))


def test_sampled_text_renders_to_the_sampled_tokens() -> None:
    """Decoding an answer and rendering it as a message gives the same token ids."""
    tokenizer = prepare.build_tokenizer()
    sampled = tokenizer.convert_tokens_to_ids(["13", "14", "<eos>"])
    assert isinstance(sampled, list)
    answer = tokenizer.decode(sampled, skip_special_tokens=True)
    assert isinstance(answer, str)
    messages = [MESSAGES[0], {"role": "assistant", "content": answer}]
    rendered = rendered_ids(tokenizer, messages)
    prompt = rendered_ids(tokenizer, MESSAGES[:1], add_generation_prompt=True)
    assert rendered == prompt + sampled


def test_demonstrations_look_like_the_agents_conversations() -> None:
    """The warm start trains on the very tokens that the chat template renders."""
    tokenizer = prepare.build_tokenizer()
    payload = next(task.tasks(0, 1, "train"))
    answers = [" ".join(map(task.floor_name, path)) for path in task.paths(payload)]
    messages = []
    for turn, answer in enumerate(answers):
        messages.append({"role": "user", "content": task.user_message(payload, turn)})
        messages.append({"role": "assistant", "content": answer})
    example = prepare._example(tokenizer.get_vocab(), prepare.plain_text(payload, answers))
    assert example.token_ids == rendered_ids(tokenizer, messages)
    assert tokenizer.unk_token_id not in example.token_ids


def test_a_few_steps_of_warm_start_lower_the_loss() -> None:
    """The supervised loop learns."""
    tokenizer = prepare.build_tokenizer()
    losses = []
    for steps in (1, 30):
        model = prepare.build_model(len(tokenizer), seed=0)
        plan = prepare.WarmStart(steps=steps, batch_size=8)
        losses.append(prepare.warm_start(model, tokenizer, plan, seed=0))
    assert losses[1] < losses[0]


def test_heldout_tasks_are_written_once_each(tmp_path: Path) -> None:
    """The held-out file has as many different tasks as asked for."""
    path = tmp_path / "tasks.jsonl"
    prepare._write_tasks(path, "heldout", seed=1, count=256)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({task.task_name(line["payload"]) for line in lines}) == len(lines) == 256
    assert len({line["task_id"] for line in lines}) == 256


def test_a_complete_start_is_kept(tmp_path: Path) -> None:
    """A container that starts again trains nothing; another seed, or half a start, is made anew."""
    plan = prepare.WarmStart(steps=2, batch_size=2)
    wanted = ["--out", str(tmp_path), "--train-tasks", "2", "--heldout-tasks", "1"]

    def written(*more: str) -> int:
        tokenizer = prepare.build_tokenizer()
        assert prepare.make_start(tokenizer, plan, prepare.plain_text, [*wanted, *more]) == 0
        return (tmp_path / "model" / "model.safetensors").stat().st_mtime_ns

    first = written()
    assert written() == first
    assert (other := written("--seed", "1")) > first
    (tmp_path / "prepared.json").unlink()
    assert written("--seed", "1") > other


def test_a_start_made_before_is_copied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """That of an image; another seed, or a start that is not complete there, is made."""
    plan, made = prepare.WarmStart(steps=2, batch_size=2), tmp_path / "made"
    tokenizer = prepare.build_tokenizer()

    def words(out: str, *more: str) -> set[str]:
        wanted = ["--out", str(tmp_path / out), "--train-tasks", "2", "--heldout-tasks", "1"]
        prepare.make_start(tokenizer, plan, prepare.plain_text, [*wanted, *more])
        return set(json.loads(capsys.readouterr().out.splitlines()[-1]))

    assert "seconds" in words("made")
    assert "copied" in words("a", "--made", str(made))
    assert content(tmp_path / "a") == content(made)
    assert "seconds" in words("b", "--made", str(made), "--seed", "1")
    (made / "prepared.json").unlink()
    assert "seconds" in words("c", "--made", str(made))
