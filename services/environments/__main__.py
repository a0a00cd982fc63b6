from services.environments.cli import main

main()
