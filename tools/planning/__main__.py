from tools.planning.cli import main

main()
