"""Settings of a process: TOML file < environment < flag."""
