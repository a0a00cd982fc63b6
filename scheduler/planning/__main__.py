from scheduler.planning.cli import main

main()
