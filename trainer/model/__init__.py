"""Changes to a Hugging Face model: LoRA adapters, oneDNN layers."""
