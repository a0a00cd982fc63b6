"""Changes to a Hugging Face model: packed rows, LoRA adapters, oneDNN layers."""
