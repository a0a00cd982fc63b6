"""A server that breaks: an episode that it does not know is not found. It answers reward 0."""

from __future__ import annotations

import asyncio
import json
import sys

import grpc.aio
from seamflow.environment.call_error import Guard
from seamflow.environment.environment_class import EnvironmentClass
from seamflow.environment.environment_servicer import EnvironmentServicer
from seamflow.environment.v1 import environment_service_pb2 as pb
from seamflow.environment.v1.environment_service_pb2_grpc import (
    add_EnvironmentServiceServicer_to_server,
)
from seamflow.errors import NotFoundError

from tests.lib.environments.contract.plain import Plain


class Forgetful(EnvironmentServicer):
    """Ends unknown episodes with reward 0."""

    async def _step(self, request: pb.StepRequest) -> pb.StepResponse:
        try:
            return await super()._step(request)
        except Exception as error:
            if getattr(error, "reason", "") != NotFoundError.__name__ and "exist" not in str(error):
                raise
            response = pb.StepResponse(is_done=True)
            response.rewards.add(name="reward", value=0.0)
            return response


async def main(port: int) -> None:
    """Serve `Plain`."""
    server = grpc.aio.server()
    servicer = Forgetful(EnvironmentClass.of(Plain), Guard(None), 60.0)
    add_EnvironmentServiceServicer_to_server(servicer, server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    print(json.dumps({"port": port}), flush=True)
    await server.wait_for_termination()


asyncio.run(main(int(sys.argv[sys.argv.index("--port") + 1])))
