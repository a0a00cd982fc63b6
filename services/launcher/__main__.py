from services.launcher.cli import main

main()
