from seamflow.runner.command_line import main

main()
