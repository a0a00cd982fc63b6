"""The real services on emulated GPUs: only GPU work is replaced, by the latency model."""
