"""The built-in scorers against a direct computation with the same model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from services.chassis.errors import ConfigError
from services.scoring.config import ScoringConfig
from services.scoring.scorer import Row, make_scorer
from tests.lib.trainer.support import VOCABULARY, make_model


def config(model: Path, **settings: Any) -> ScoringConfig:
    """Of a service that is asked directly."""
    return ScoringConfig(run_id="r", column="c", model=model, dtype="float64", **settings)


def rows(seed: int = 0) -> list[Row]:
    """Ragged sequences, each token at its own temperature; the shortest has one token."""
    dice = np.random.default_rng(seed)
    return [
        Row(
            sample_id=f"s{length}",
            token_ids_T=dice.integers(0, VOCABULARY, length).astype(np.int32),
            temperatures_T=np.linspace(0.5, 0.5 + 0.1 * length, length, dtype=np.float32),
            columns={},
        )
        for length in (7, 1, 12, 3, 12)
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny causal language model."""
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny one with a head of one label."""
    return make_classifier(tmp_path_factory.mktemp("reward"), 1)


def make_classifier(folder: Path, num_labels: int) -> Path:
    """A folder with a sequence classifier."""
    from transformers import Qwen3Config, Qwen3ForSequenceClassification

    torch.manual_seed(1)
    settings = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    settings.num_labels = num_labels
    Qwen3ForSequenceClassification(settings).save_pretrained(folder)  # type: ignore[no-untyped-call]
    return folder


def direct(model: Path, row: Row) -> np.ndarray:
    """Log-probs of one sequence alone."""
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    ids = torch.from_numpy(row.token_ids_T.astype(np.int64))
    with torch.no_grad():
        logits = network(ids[None]).logits[0]
    divisors = torch.from_numpy(row.temperatures_T[1:].astype(np.float64))
    logits = logits[:-1] / divisors[:, None]
    logprobs = torch.log_softmax(logits, -1)
    return np.array([0.0, *(logprobs[t - 1, ids[t]].item() for t in range(1, len(ids)))])


def scored(settings: ScoringConfig, given: Sequence[Row]) -> Sequence[np.ndarray]:
    """By the scorer that is configured."""
    return make_scorer(settings).score(given)


def group(seed: int = 0) -> list[Row]:
    """Sequences that share a prompt, two of them an answer's begin, with one temperature each."""
    dice = np.random.default_rng(seed)
    prompt = dice.integers(0, VOCABULARY, 9).tolist()
    answers = [[1, 2, 3, 4], [1, 2, 5], [6], [], [1, 2, 3, 4]]
    return [
        Row(
            sample_id=f"s{number}",
            token_ids_T=np.array([*prompt, *answer], np.int32),
            temperatures_T=np.full(9 + len(answer), 1.0 if number < 3 else 0.5, np.float32),
            columns={},
        )
        for number, answer in enumerate(answers)
    ]


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("scorer", ["logprobs", "reward_model"])
def test_a_shared_prefix_is_computed_once(
    model: Path, reward_model: Path, scorer: str, packing: bool
) -> None:
    """Of 57 tokens 15 are distinct; without packing all are computed, and with the same values."""
    folder = model if scorer == "logprobs" else reward_model
    made: Any = make_scorer(config(folder, scorer=scorer, packing=packing))
    computed = computed_tokens(made)
    found = made.score(group())
    assert sum(len(row.token_ids_T) for row in group()) == 57
    assert sum(computed) == 15 if packing else sum(computed) >= 57
    alone = [scored(config(folder, scorer=scorer), [row])[0] for row in group()]
    for values, expected in zip(found, alone, strict=True):
        np.testing.assert_allclose(values, expected, atol=2e-6)


@pytest.mark.parametrize("scorer", ["logprobs", "reward_model"])
def test_a_forward_pass_keeps_to_the_budget(model: Path, reward_model: Path, scorer: str) -> None:
    """A shared prefix counts once in it; a row longer than it has a pass of its own."""
    folder = model if scorer == "logprobs" else reward_model
    expected = scored(config(folder, scorer=scorer), group())
    for budget, passes in ((13, 2), (15, 1), (1, 5)):
        made: Any = make_scorer(config(folder, scorer=scorer, micro_batch_tokens=budget))
        computed = computed_tokens(made)
        for values, same in zip(made.score(group()), expected, strict=True):
            np.testing.assert_allclose(values, same, atol=2e-6)
        assert len(computed) == passes
        assert max(computed) <= max(budget, 13)


def computed_tokens(scorer: Any) -> list[int]:
    """The tokens of each forward pass from now on."""
    computed: list[int] = []
    embeddings = scorer._model.get_input_embeddings()
    embeddings.register_forward_hook(lambda _module, given, _out: computed.append(given[0].numel()))
    return computed


@pytest.mark.parametrize("budget", [1, 24, 10_000])
def test_log_probs_are_those_of_the_model(model: Path, budget: int) -> None:
    """However rows are put together, at each one's own temperature."""
    found = scored(config(model, micro_batch_tokens=budget), rows())
    for values, row in zip(found, rows(), strict=True):
        assert values.dtype == np.float32
        np.testing.assert_allclose(values, direct(model, row), atol=2e-6)


def test_a_reward_model_scores_whole_sequences(reward_model: Path) -> None:
    """One value each, the logit of its only label at the last token."""
    from transformers import AutoModelForSequenceClassification

    network = AutoModelForSequenceClassification.from_pretrained(reward_model, dtype=torch.float64)
    found = scored(config(reward_model, scorer="reward_model"), rows())
    for values, row in zip(found, rows(), strict=True):
        ids = torch.from_numpy(row.token_ids_T.astype(np.int64))
        with torch.no_grad():
            expected = network(ids[None]).logits.item()
        np.testing.assert_allclose(values, [expected], rtol=1e-5)
    assert len({float(values[0]) for values in found}) > 1


@pytest.mark.parametrize("scorer", ["logprobs", "reward_model"])
def test_weights_that_wait_on_the_host_score_alike(
    model: Path, reward_model: Path, scorer: str
) -> None:
    """To the last bit, batch after batch."""
    folder = model if scorer == "logprobs" else reward_model
    expected = scored(config(folder, scorer=scorer), rows())
    swapping = make_scorer(config(folder, scorer=scorer, cpu_offload=True))
    for _ in range(2):
        for values, same in zip(swapping.score(rows()), expected, strict=True):
            np.testing.assert_array_equal(values, same)


@pytest.mark.parametrize("cpu_offload", [True, False])
def test_a_block_is_swapped_in_while_the_one_before_it_computes(
    model: Path, cpu_offload: bool
) -> None:
    """And is out again when it has computed; without the setting every block is in all the time."""
    scorer: Any = make_scorer(config(model, cpu_offload=cpu_offload))
    blocks = list(scorer._model.model.layers)
    seen: list[list[bool]] = []
    for block in blocks:
        # Called from within the block: there the hooks that swap have run.
        block.mlp.register_forward_pre_hook(
            lambda _module, _inputs: seen.append([is_in(block) for block in blocks])
        )
    scorer.score(rows()[:1])
    numbers = range(len(blocks))
    two = [[place in (number, number + 1) for place in numbers] for number in numbers]
    assert len(blocks) > 1
    assert (seen == two) is cpu_offload
    assert [is_in(block) for block in blocks] == [not cpu_offload] * len(blocks)


def is_in(block: nn.Module) -> bool:
    """Whether the weights of `block` are where it can compute with them."""
    return all(weight.numel() for weight in block.parameters())


def test_after_a_pass_that_failed_the_next_is_right(model: Path) -> None:
    """The block that failed is out, and what was copied ahead does no harm."""
    expected = scored(config(model), rows())
    scorer: Any = make_scorer(config(model, cpu_offload=True))
    first = scorer._model.model.layers[0]
    failing = first.mlp.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        scorer.score(rows())
    assert not is_in(first)
    failing.remove()
    for values, same in zip(scorer.score(rows()), expected, strict=True):
        np.testing.assert_array_equal(values, same)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scorer": "logprob"}, r"scorer is 'logprob'.*did you mean logprobs\?"),
        ({"model": Path("nowhere")}, r"scorer logprobs: model nowhere: no such folder"),
    ],
)
def test_load_errors_name_the_model(model: Path, settings: dict[str, Any], message: str) -> None:
    """With the setting, its value and the cure."""
    with pytest.raises(ConfigError, match=message):
        make_scorer(config(**{"model": model, **settings}))


def test_a_classifier_is_no_reward_model(tmp_path: Path) -> None:
    """It must say one thing."""
    classifier = make_classifier(tmp_path, 3)
    with pytest.raises(ConfigError, match="has 3 labels, a reward model has 1"):
        make_scorer(config(classifier, scorer="reward_model"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_samples": 0}, "(?s)max_samples.*greater than or equal to 1"),
        ({"threads": 0}, "(?s)threads.*greater than or equal to 1"),
        ({"scheduler": "a:1"}, "scheduler is 'a:1', node_agent False and node_id '': a node is"),
        ({"needs": ("c",)}, "needs holds 'c', which is the column to write"),
    ],
)
def test_wrong_settings_are_named(model: Path, settings: dict[str, Any], message: str) -> None:
    """With the value and the cure."""
    with pytest.raises(ValueError, match=message):
        config(model, **settings)
