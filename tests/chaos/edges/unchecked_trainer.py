"""Control: a trainer that neither checks its samples nor replaces their groups."""

from __future__ import annotations

from collections.abc import Mapping
from unittest import mock

from trainer.cli import main
from trainer.leasing import accepted_samples
from trainer.leasing.accepted_samples import AcceptedSamples


async def _end(self: AcceptedSamples, step: int, messages: Mapping[str, str]) -> None:
    raise ValueError(messages)


if __name__ == "__main__":
    AcceptedSamples.reject = _end  # type: ignore[method-assign]
    accepted_samples.SampleReader._check = lambda self, item: None  # type: ignore[method-assign]
    accepted_samples._check_rewards = lambda item, name: None
    mock.patch("trainer.data.token_sequence.MIN_TEMPERATURE", 1e-38).start()
    main()
