"""The environment server: `python -m seamflow.environment` serves a class or a function."""

from seamflow.environment.environment_arguments import main

main()
