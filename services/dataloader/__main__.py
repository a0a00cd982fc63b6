from services.dataloader.cli import main

main()
