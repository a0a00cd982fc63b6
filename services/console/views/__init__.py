"""What the API answers, as JSON values."""
