"""What a run leaves: summary, pictures, how it ended."""
