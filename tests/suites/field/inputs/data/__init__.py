"""Tasks, data sets, and what is shown of them."""
