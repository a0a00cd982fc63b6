"""Domain code that two or more processes share."""
