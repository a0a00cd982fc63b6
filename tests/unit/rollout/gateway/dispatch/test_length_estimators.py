"""Expected lengths: learned from turns that ended, and whose word is taken."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout.gateway.config import GatewayConfig
from rollout.gateway.dispatch.length_estimators import (
    LengthQuery,
    RunningMeans,
    load_lengths,
    remaining_tokens,
)
from services.chassis.errors import ConfigError


def of(group: str) -> LengthQuery:
    """A turn of a group."""
    return LengthQuery(group=group)


def test_a_group_has_its_own_mean_and_others_the_runs() -> None:
    """Nothing is known before the first turn has ended."""
    means = RunningMeans()
    assert means.predict(of("a")) is None
    for length in (10, 30):
        means.observe(of("a"), length)
    means.observe(of("b"), 80)
    assert [means.predict(of(group)) for group in "abc"] == [20, 80, 40]


def test_the_run_forgets_old_lengths() -> None:
    """The policy in training changes them; a mean over everything would lag behind."""
    means = RunningMeans()
    for _ in range(5000):
        means.observe(of("a"), 10)
    for _ in range(1500):
        means.observe(of("a"), 1000)
    assert means.predict(of("new")) == pytest.approx(1000, rel=0.01)


def test_groups_are_bounded() -> None:
    """The one whose last turn ended first is forgotten; it falls back to the run's mean."""
    means = RunningMeans(max_groups=2)
    for group, length in (("a", 10), ("b", 20), ("a", 10), ("c", 30)):
        means.observe(of(group), length)
    assert (means.predict(of("a")), means.predict(of("b"))) == (10, 17.5)


class Constant(RunningMeans):
    """A plug-in estimator."""

    def predict(self, query: LengthQuery) -> float | None:
        """Always the same."""
        return 7.0


def config(lengths: str) -> GatewayConfig:
    """A gateway's, with that estimator."""
    return GatewayConfig(run_id="run", model=Path("model"), lengths=lengths)


def test_a_plug_in_estimator_is_loaded_by_its_name() -> None:
    """With the gateway's configuration, as any plug-in is; so is the built-in one."""
    own = load_lengths(config(f"{__name__}:Constant"))
    assert own.predict(of("a")) == 7.0
    assert isinstance(load_lengths(config("running_means")), RunningMeans)


def test_an_unknown_estimator_is_told_with_the_known_ones() -> None:
    """A wrong name in a config file ends the start."""
    with pytest.raises(ConfigError, match=r"ranker.*running_means"):
        load_lengths(config("means"))


@pytest.mark.parametrize(
    ("lengths", "ranker"), [("ranker", None), ("running_means", "127.0.0.1:50059")]
)
def test_a_ranker_is_used_by_name_and_address(lengths: str, ranker: str | None) -> None:
    """One without the other would do nothing, silently."""
    with pytest.raises(ValueError, match=r"lengths is .* and ranker is"):
        GatewayConfig(run_id="run", model=Path("model"), lengths=lengths, ranker=ranker)


def test_a_wrong_latency_table_is_refused_at_the_start() -> None:
    """Before any turn would need it."""
    with pytest.raises(ValueError, match="batch size"):
        GatewayConfig(run_id="run", model=Path("model"), decode_latency={"x": 1.0})


@pytest.mark.parametrize(
    ("expected", "sampled", "most", "rest"),
    [
        (None, 0, 500, 500),
        (100.0, 0, 500, 100),
        (100.0, 30, 470, 70),
        (100.0, 90, 410, 90),
        (100.0, 300, 200, 200),
        (1000.0, 0, 500, 500),
        (0.0, 0, 500, 1),
    ],
)
def test_what_remains_of_a_turn(
    expected: float | None, sampled: int, most: int, rest: float
) -> None:
    """At most the limit; a turn longer than the mean is in the long tail."""
    assert remaining_tokens(expected, sampled, most) == rest
