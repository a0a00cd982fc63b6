"""What a run does, waits for and has recorded: read from its services and from its folder."""
