"""Memory, time, nodes and cost of a run before anything is rented: `seamflow plan`.

run_shape.py        what the run's configuration says of its size
training_count.py   bytes and operations of a rank, counted on the trainer's own code
live_bytes.py       bytes that are alive, operation by operation
engine_size.py      weights and KV cache of an engine
step_seconds.py     seconds of a step, by rooflines or as measured
cures.py            settings that make a run fit
splits.py           which nodes generate, train, or do both; Helm values
"""
