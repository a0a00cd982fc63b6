"""The environment server: `python -m seamflow.environment` serves a class or a function."""

from seamflow.environment.environment_arguments import main
from seamflow.processes.left_processes import whole_process

with whole_process():
    main()
