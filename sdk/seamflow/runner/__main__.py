from seamflow.processes.left_processes import whole_process
from seamflow.runner.command_line import main

with whole_process():
    main()
