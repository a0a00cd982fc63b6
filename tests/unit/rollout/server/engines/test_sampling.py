"""Sampling follows the distribution it is asked for, and the seed it is given."""

from __future__ import annotations

import pytest
import torch

from rollout.server.engines.torch.batch import SamplingRows, sample, uniform

ROWS = 4000


def rows(
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 8,
    min_p: float = 0.0,
    seed: int = 3,
) -> SamplingRows:
    """One seed, `ROWS` positions."""
    return SamplingRows(
        temperature_R=torch.full((ROWS,), temperature),
        top_p_R=torch.full((ROWS,), top_p),
        top_k_R=torch.full((ROWS,), top_k),
        min_p_R=torch.full((ROWS,), min_p),
        seed_R=torch.full((ROWS,), seed),
        position_R=torch.arange(ROWS),
        all_greedy=temperature == 0,
        any_greedy=temperature == 0,
        scaled=temperature not in (0.0, 1.0),
        filtered=top_p < 1 or top_k < 8 or min_p > 0,
    )


LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0, float("-inf")])


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_frequencies_follow_the_softmax(temperature: float) -> None:
    """Drawn frequencies match the tempered softmax within five standard errors."""
    ids, logprobs = sample(LOGITS.expand(ROWS, 8), rows(temperature))
    expected = (LOGITS / temperature).softmax(-1)
    frequency = torch.bincount(ids, minlength=8) / ROWS
    error = (expected * (1 - expected) / ROWS).sqrt()
    assert ((frequency - expected).abs() <= 5 * error).all()
    assert torch.allclose(logprobs, expected.log()[ids], atol=1e-5)


@pytest.mark.parametrize("vocabulary", [1, 127, 128, 129, 1000])
def test_a_draw_inverts_the_cumulative_distribution(vocabulary: int) -> None:
    """At every size of the vocabulary, also where most tokens are impossible."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits = 4 * torch.randn(ROWS, vocabulary, generator=generator)
    impossible = torch.rand(ROWS, vocabulary, generator=generator) < 0.7
    impossible[:, -1] = False
    logits[impossible] = float("-inf")
    asked = rows(top_k=8)
    ids = sample(logits, asked)[0][:, None]
    assert not impossible.gather(1, ids).any()
    probs = logits.double().softmax(-1)
    reached = probs.cumsum(-1).gather(1, ids)[:, 0]
    wanted = uniform(asked.seed_R, asked.position_R).double()
    assert (reached > wanted - 1e-5).all()
    assert (reached - probs.gather(1, ids)[:, 0] < wanted + 1e-5).all()


def test_top_k_keeps_the_likeliest_and_the_full_logprob() -> None:
    """Only the k likeliest are drawn; log-probs are those before the filter."""
    ids, logprobs = sample(LOGITS.expand(ROWS, 8), rows(top_k=3))
    assert set(ids.tolist()) == {0, 1, 2}
    assert torch.allclose(logprobs, LOGITS.log_softmax(-1)[ids], atol=1e-5)


def test_top_p_keeps_the_smallest_sufficient_set() -> None:
    """The likeliest token alone suffices for a small mass; two are kept for a little more."""
    likeliest = LOGITS.softmax(-1)[0].item()
    assert set(sample(LOGITS.expand(ROWS, 8), rows(top_p=likeliest - 0.01))[0].tolist()) == {0}
    assert set(sample(LOGITS.expand(ROWS, 8), rows(top_p=likeliest + 0.01))[0].tolist()) == {0, 1}


def test_min_p_keeps_what_is_likely_beside_the_likeliest() -> None:
    """Logits one apart differ by a factor of e: a share of 0.3 keeps one more, 0.1 three more."""
    assert set(sample(LOGITS.expand(ROWS, 8), rows(min_p=0.3))[0].tolist()) == {0, 1}
    ids, logprobs = sample(LOGITS.expand(ROWS, 8), rows(min_p=0.1))
    assert set(ids.tolist()) == {0, 1, 2, 3}
    assert torch.allclose(logprobs, LOGITS.log_softmax(-1)[ids], atol=1e-5)
    assert set(sample(LOGITS.expand(ROWS, 8), rows(min_p=1.0))[0].tolist()) == {0}


def test_greedy_takes_the_likeliest_with_the_plain_logprob() -> None:
    """Temperature 0 is the argmax, reported at temperature 1."""
    ids, logprobs = sample(LOGITS.expand(ROWS, 8), rows(temperature=0.0))
    assert set(ids.tolist()) == {0}
    assert torch.allclose(logprobs, LOGITS.log_softmax(-1)[0].expand(ROWS), atol=1e-5)


def test_uniform_is_a_function_of_seed_and_position() -> None:
    """Equal (seed, position) give equal numbers; seeds differ; the numbers fill [0, 1) evenly."""
    positions = torch.arange(ROWS)
    first = uniform(torch.full((ROWS,), 5), positions)
    assert torch.equal(first, uniform(torch.full((ROWS,), 5), positions))
    assert not torch.equal(first, uniform(torch.full((ROWS,), 6), positions))
    assert first.min() >= 0
    assert first.max() < 1
    assert first.mean().item() == pytest.approx(0.5, abs=0.03)
    correlation = torch.corrcoef(torch.stack([first[1:], first[:-1]]))[0, 1].item()
    assert abs(correlation) < 0.08
