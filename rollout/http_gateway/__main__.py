from rollout.http_gateway.cli import main

main()
