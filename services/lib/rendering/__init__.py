"""Chat templates, rendered in processes that can be killed."""
