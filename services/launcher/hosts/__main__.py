"""`seamflow join`: this host's part of a run that began on another host."""

import os

# Set before gRPC is imported: keeps its messages on closed connections out of the terminal.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

from services.launcher.hosts.join import main

main()
