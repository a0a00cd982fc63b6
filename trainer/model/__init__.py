"""The policy model: loading, forward pass, packing, LoRA."""
