"""The trainer: leases samples, takes optimizer steps under FSDP2, publishes weights."""
