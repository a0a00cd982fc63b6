"""The `seamflow` command for operators."""
