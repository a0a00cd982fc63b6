"""Prompts begin with what is recorded, for every model family; what was rewritten forks."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout.gateway.prompt.chat_template import ChatTemplate
from tests.suites.roundtrips.__main__ import trips
from tests.suites.roundtrips.controls import RolesOnlyPrompt, reencoded
from tests.suites.roundtrips.families import FAMILIES

CONVERSATIONS = 30


@pytest.mark.parametrize("name", FAMILIES)
async def test_prompts_continue_the_record(name: str, tmp_path: Path) -> None:
    """Whatever liberties the client takes, and nothing that was rewritten is shown."""
    counts, failures = await trips(name, tmp_path, range(CONVERSATIONS))
    assert failures == []
    # They have tried what they are meant to.
    kinds = ("turns_continued", "turns_after_rewritten_history", "tool_calls", "parse_errors")
    assert min(counts[kind] for kind in kinds) > 3
    assert bool(counts["turns_rewritten_by_template"]) == FAMILIES[name].rewrites_history


@pytest.mark.parametrize("name", FAMILIES)
async def test_without_matching_round_trips_fail(name: str, tmp_path: Path) -> None:
    """Negative control: encoded as a whole, prompts have other ids than were sampled."""
    counts, _ = await trips(name, tmp_path, range(5), reencoded)
    assert counts["prefix_mismatches"]


@pytest.mark.parametrize("name", FAMILIES)
async def test_a_silent_mismatch_is_noticed(name: str, tmp_path: Path) -> None:
    """Negative control: matched by roles alone, rewritten messages are still shown."""
    counts, _ = await trips(name, tmp_path, range(12), RolesOnlyPrompt.parse)
    assert counts["silent_mismatches"]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_format_is_found(name: str, tmp_path: Path) -> None:
    """By the markers of the chat template alone."""
    family = FAMILIES[name]
    template = ChatTemplate(family.make_model(tmp_path))
    assert template.format.name == family.response_format
