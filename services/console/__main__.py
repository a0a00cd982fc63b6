import os

# gRPC tells on stderr that it does not follow the start of a child process.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

from services.console.cli import main

main()
