"""The answer of a turn: its text, parsed into content, reasoning and tool calls."""
