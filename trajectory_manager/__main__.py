from trajectory_manager.cli import main

main()
