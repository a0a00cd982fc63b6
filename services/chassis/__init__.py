"""What every seamflow process shares: config, server, errors, logs, metrics, plug-ins."""
