from services.node_agent.cli import main

main()
