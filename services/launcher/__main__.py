import os

# Read when gRPC is first imported: its notes on closed connections are not for the terminal.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

from services.launcher.cli import main

main()
