"""The store's interface; each method is one atomic step."""
