from services.scoring.cli import main

main()
