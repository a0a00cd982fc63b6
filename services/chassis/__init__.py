"""Infrastructure shared by all processes: config, server, errors, logs, metrics, plug-ins."""
