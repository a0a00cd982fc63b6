"""Memory, time and cost of a run before anything is rented: `seamflow forecast`.

run_shape.py        what the run's configuration says of its size
training_count.py   bytes and operations of a rank, counted on the trainer's own code
counted_pass.py     one pass on tensors without memory
engine_size.py      weights and KV cache of an engine
step_seconds.py     seconds by rooflines, played through by `tools.planning.timeline`
cures.py            settings that make a run fit
devices.py          names of devices; services/node_agent/known_devices.toml describes them
"""
