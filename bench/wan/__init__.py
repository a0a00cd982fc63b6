"""Two places joined by a slow link, emulated on one machine: `make bench-wan`."""
