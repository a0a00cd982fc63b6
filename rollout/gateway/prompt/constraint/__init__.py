"""What an agent demands of an answer: tool calls, and content of a JSON Schema."""
