from tools.forecast.cli import main

main()
