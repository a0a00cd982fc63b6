"""The phases of a run: start, learn, serve, end; and what is watched through all of them."""
