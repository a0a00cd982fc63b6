"""The stores that `bench.store` measures beside ours, each driven by one file of this folder."""
