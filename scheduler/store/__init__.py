"""The scheduler's durable state in Redis."""
