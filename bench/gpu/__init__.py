"""What a GPU does with our trainer and engines, beside what it can do."""
