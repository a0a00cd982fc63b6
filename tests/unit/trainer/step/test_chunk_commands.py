"""The commands of mini-batches: rows go to the ranks once."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.lib.trainer.support import make_samples, trainer_config
from trainer.commands import encode
from trainer.data.token_sequence import sequence, trainable_tokens
from trainer.step.chunk_commands import ChunkCommands


def test_rows_of_a_mini_batch_are_sent_to_be_predicted_and_not_with_its_updates() -> None:
    """However many epochs there are; what else an update needs is in its command."""
    config = trainer_config(
        run_id="r",
        model=Path("m"),
        checkpoint__folder=Path("c"),
        algorithm__num_mini_batches=2,
        algorithm__num_epochs=3,
    )
    sequences = [sequence(sample) for sample in make_samples(0)]
    chunks = ChunkCommands(config, 2, packed=True)
    found = chunks.mini_batches(sequences, 2, np.random.default_rng(0))
    trained = [
        int(batch.loss_mask_BT.sum())
        for each in found
        for command in each.predict
        for batch in command.micro_batches
    ]
    assert sum(trained) == trainable_tokens(sequences)
    for number, each in enumerate(found):
        assert [command.mini_batch for command in each.predict] == [number] * 2
        assert [command.mini_batch for command in each.accumulate] == [number] * 2
        for command, rows in zip(each.accumulate, each.predict, strict=True):
            assert command.micro_batches == ()
            assert command.num_tokens > 0
            assert len(encode(command)) < len(encode(rows))


def test_ranks_of_a_context_group_get_the_same_rows() -> None:
    """Each row goes to one group; a rank that is in none gets rows that count nothing."""
    config = trainer_config(
        run_id="r", model=Path("m"), checkpoint__folder=Path("c"), context_parallel=2
    )
    sequences = [sequence(sample) for sample in make_samples(0)]
    found = ChunkCommands(config, 5, packed=True).of(sequences, 2)
    trained = [
        [int(batch.loss_mask_BT.sum()) for batch in command.micro_batches] for command in found
    ]
    assert trained[0] == trained[1] != trained[2] == trained[3]
    assert sum(trained[0] + trained[2]) == trainable_tokens(sequences)
    assert trained[4] == [0] * len(trained[0])
    assert found[0].micro_batches is found[1].micro_batches
