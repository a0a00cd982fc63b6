from seamflow.runner.command_line import main
from seamflow.user_code.left_processes import whole_process

with whole_process():
    main()
