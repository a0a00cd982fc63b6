from seamflow.processes.left_processes import whole_process

from services.tool_loop.cli import main

with whole_process():
    main()
