"""The wires that agents speak: one file for each."""
