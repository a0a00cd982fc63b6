"""From leased samples to micro-batches: arrays, advantages, chunks."""
