from rollout.server.cli import main

main()
