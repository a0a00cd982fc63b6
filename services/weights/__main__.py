from services.weights.cli import main

main()
