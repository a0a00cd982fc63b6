"""A tiny language model as the ranker: what it learns, keeps and refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM

from bench.harness.byte_model import make_byte_model
from services.chassis.errors import ConfigError
from services.ranker.cli import _regression
from services.ranker.config import LanguageModelConfig, RankerConfig
from services.ranker.features import TurnStart
from services.ranker.language_model import LanguageModelRegression, _order
from services.ranker.learner import Memory, learn, recall_of_longest
from services.ranker.prompt_encoder import PromptEncoder, batches
from services.ranker.regression import HASHED
from tests.lib.ranker.support import length, prompts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers with random weights."""
    torch.manual_seed(0)
    shape: Any = {"num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = Qwen3Config(vocab_size=512, hidden_size=32, intermediate_size=64, head_dim=16, **shape)
    found = tmp_path_factory.mktemp("model")
    make_byte_model(found)
    Qwen3ForCausalLM(config).save_pretrained(found)
    return found


def regression(folder: Path, **settings: Any) -> LanguageModelRegression:
    """Of the tiny model, with a rate for its size."""
    return LanguageModelRegression(
        LanguageModelConfig(model=folder, **{"learning_rate": 3e-3, "epochs": 3, **settings})
    )


def start(ids: list[int], number: int = 0) -> TurnStart:
    """The first turn of a task."""
    return TurnStart(task_id=f"task-{number}@0", token_ids=ids, turn_index=0)


def remembered(of: LanguageModelRegression, lengths: list[int]) -> Memory:
    """As many prompts with these lengths."""
    memory = Memory(1000, of)
    for i, (ids, tokens) in enumerate(zip(prompts(len(lengths)), lengths, strict=True)):
        memory.add(start(ids, i), tokens)
    return memory


def recall_on_new(of: LanguageModelRegression, lengths: list[int]) -> float:
    """Recall on prompts of tasks that it has not seen, after learning these lengths."""
    learned = learn(remembered(of, lengths).examples(), of)
    new = prompts(150, seed=1)
    expected = learned.expected_tokens([start(ids, 5000 + i) for i, ids in enumerate(new)])
    return recall_of_longest(np.array(expected), np.array([float(length(ids)) for ids in new]))


def test_lengths_that_depend_on_words_are_learned(folder: Path) -> None:
    """By the head, and better with trained layers."""
    lengths = [length(ids) for ids in prompts(300)]
    head = recall_on_new(regression(folder, trained_layers=0), lengths)
    tuned = recall_on_new(regression(folder, trained_layers=2, epochs=8), lengths)
    assert head >= 0.35
    assert tuned >= head + 0.1


def test_nothing_is_found_where_lengths_depend_on_nothing(folder: Path) -> None:
    """Negative control: the same lengths, dealt to other prompts, are ranked as by chance."""
    lengths = [length(ids) for ids in prompts(300)]
    np.random.default_rng(0).shuffle(lengths)
    assert recall_on_new(regression(folder, trained_layers=2, epochs=1), lengths) < 0.45


def test_the_same_data_give_the_same_model(folder: Path) -> None:
    """Also after another fit: none begins with the weights of the one before."""
    of = regression(folder, trained_layers=1, epochs=1)
    examples = remembered(of, [length(ids) for ids in prompts(40)]).examples()
    probe = [start(ids) for ids in prompts(5, seed=2)]
    first = learn(examples, of).expected_tokens(probe)
    learn(examples[:20], of)
    assert learn(examples, of).expected_tokens(probe) == pytest.approx(first, rel=1e-4)


def test_the_cut_model_computes_what_the_whole_does(folder: Path) -> None:
    """Rows of different lengths, padded in one batch; states are kept in half precision."""
    rows = [np.array(ids, np.int32) for ids in prompts(6)]
    whole = PromptEncoder(folder, 0, device="cpu", max_kept=1 << 20)
    cut = regression(folder, trained_layers=2, learning_rate=1e-12, epochs=1)
    logs, ones = np.arange(6.0), np.ones(6)
    model = cut.fit(rows, logs, ones)
    states = cut._encoder.states(rows)
    expected = torch.stack(whole.states(rows)).numpy()
    assert [len(each) for each in states] == [len(row) for row in rows]
    np.testing.assert_allclose(model.features(states), expected, atol=0.02)


def test_kept_states_are_bounded_and_computed_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompts used last stay; what was dropped is computed again and is the same."""
    rows = [np.full(10, i, np.int32) for i in range(20)]
    bytes_of_one = 2 * 32 * 4
    encoder = PromptEncoder(folder, 0, device="cpu", max_kept=5 * bytes_of_one)
    first = [states.clone() for states in encoder.states(rows)]
    assert encoder._num_kept == 5 * bytes_of_one
    assert len(encoder._kept) == 5
    for states, again in zip(first, encoder.states(rows), strict=True):
        torch.testing.assert_close(states, again)
    monkeypatch.setattr(encoder, "lower", None)
    encoder.states([first_kept := rows[10]])  # computes nothing
    with pytest.raises(TypeError):
        encoder.states([first_kept, rows[9]])


def test_of_a_long_prompt_both_ends_are_read(folder: Path) -> None:
    """An empty one has a token, too; ids of another vocabulary do not end the process."""
    of = regression(folder, max_prompt_tokens=4)
    assert of.read(start([1, 2, 3, 4, 5, 6])).tolist() == [1, 2, 5, 6]
    assert of.read(start([])).tolist() == [0]
    assert of.read(start([512, -1])).tolist() == [0, 511]


def test_batches_hold_each_prompt_once() -> None:
    """Similar lengths together, within the limit of padded tokens."""
    lengths = [5, 2000, 700, 10, 700, 700, 9999]
    found = list(batches(lengths))
    assert sorted(i for batch in found for i in batch) == list(range(7))
    assert all(len(b) == 1 or len(b) * max(lengths[i] for i in b) <= 2048 for b in found)


def test_an_epoch_trains_on_each_prompt_once() -> None:
    """In random batches of at most 16; another epoch has other ones."""
    found = list(_order(150, 2))
    half = len(found) // 2
    for epoch in (found[:half], found[half:]):
        assert sorted(i for batch in epoch for i in batch) == list(range(150))
    assert max(map(len, found)) == 16
    assert found[:half] != found[half:]


def test_a_model_that_cannot_be_cut_is_refused_with_the_cure(tmp_path: Path, folder: Path) -> None:
    """Other parts than a Llama's, or too few layers; its head alone can be trained."""
    small = GPT2Config(vocab_size=512, n_embd=32, n_layer=2, n_head=2)
    make_byte_model(tmp_path)
    GPT2LMHeadModel(small).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"trained_layers is 2.*no list of layers.*= 0"):
        regression(tmp_path, trained_layers=2)
    with pytest.raises(ValueError, match=r"trained_layers is 4.*4 layers.*= 0"):
        regression(folder, trained_layers=4)
    of = regression(tmp_path, trained_layers=0)
    assert np.isfinite(
        of.fit([np.arange(5, dtype=np.int32)] * 5, np.ones(5), np.ones(5)).predict(
            [np.arange(3, dtype=np.int32)]
        )
    ).all()


@pytest.mark.parametrize(
    "settings",
    [{"kind": "language_model"}, {"language_model": {"model": "folder"}}],
)
def test_kind_and_model_are_given_together(settings: dict[str, Any]) -> None:
    """Else one of them would do nothing."""
    with pytest.raises(ValueError, match=r"kind is .* and language_model\.model is"):
        RankerConfig(run_id="run", **settings)


def test_the_kind_is_made_by_configuration(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unusable folder, and missing packages, are errors of the configuration with a cure."""

    def made(model: Path) -> Any:
        settings = LanguageModelConfig(model=model)
        return _regression(
            RankerConfig(run_id="run", kind="language_model", language_model=settings)
        )

    assert isinstance(made(folder), LanguageModelRegression)
    with pytest.raises(ConfigError, match=r"language_model: model .*no such folder; give"):
        made(folder / "none")
    monkeypatch.setattr("services.ranker.cli.find_spec", lambda name: name == "sklearn" or None)
    with pytest.raises(ConfigError, match=r"pip install 'seamflow\[ranker-language-model\]'"):
        made(folder)
    assert _regression(RankerConfig(run_id="run")) is HASHED
