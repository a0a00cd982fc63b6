from services.ranker.cli import main

main()
