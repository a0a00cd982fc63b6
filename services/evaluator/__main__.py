from services.evaluator.cli import main

main()
