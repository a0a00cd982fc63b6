"""The agent runner: `python -m seamflow.runner` runs an agent on leased tasks."""
