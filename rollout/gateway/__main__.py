from rollout.gateway.cli import main

main()
