"""gRPC servicers: validation, conversion, one handler per rpc."""
