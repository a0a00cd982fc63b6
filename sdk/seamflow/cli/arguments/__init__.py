"""The command line: its verbs and flags, and the verbs that are modules of the services."""
