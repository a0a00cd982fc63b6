"""`seamflow init`: a project to start from."""
