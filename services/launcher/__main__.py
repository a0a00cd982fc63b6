import os

# Set before gRPC is imported: keeps its messages on closed connections out of the terminal.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

from services.launcher.cli import main

main()
