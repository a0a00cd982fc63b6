"""The SGLang engine: a separate server process, driven over HTTP."""
