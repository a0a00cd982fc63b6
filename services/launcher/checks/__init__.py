"""What is checked before and while a run trains."""
