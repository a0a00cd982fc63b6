"""The SGLang engine: a server process of its own, driven over HTTP."""
