"""What the command line of `seamflow train` says beside the settings of its table."""
