"""Text of token ids, and the parts of a conversation in it."""
