"""The pieces that algorithms are built from: advantages, importance, losses."""
