"""Real size: loading, balance, memory."""
