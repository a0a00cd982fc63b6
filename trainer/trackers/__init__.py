"""The built-in trackers, one file each; each loads its library when it is chosen."""
