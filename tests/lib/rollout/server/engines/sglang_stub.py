"""The parts of SGLang's HTTP API that the adapter uses, with tokens the test decides on.

It keeps what was seen of the real 0.5.23: an abort only reaches requests it knows, an aborted
request answers with what it has, one aborted in the queue repeats its last token, the cache is not
flushed while anything runs, a release answers 200 and null whatever it frees. Its constants are
those of a GPU; `tests/system/rollout/server/test_sglang.py` compares their names with the real one.
"""

from __future__ import annotations

import asyncio
import base64
import json
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

INTERVAL = 4
HELD_BYTES = 8 << 30
"""Weights and cache on the device."""
OTHER_BYTES = 3 << 30
"""In use besides: graphs, the CUDA context, other processes."""


class StubRequest:
    """One request that runs: its output is 10, 11, 12, ... with the id as its log-prob."""

    def __init__(self, body: dict[str, Any], label: str) -> None:
        """`label` names the weights it starts under."""
        self.body = body
        self.sent = 0
        self.spans = [{"version": label, "start": 0, "end": 0}]
        self.aborted = asyncio.Event()

    def message(
        self, count: int, label: str, reason: dict[str, Any] | None, omit: set[str]
    ) -> bytes:
        """`count` more tokens, in a message without the fields `omit`."""
        first = len(self.body["input_ids"]) + self.sent
        ids = [(first + n) % 64 for n in range(count)]
        self.sent += count
        if self.spans[-1]["version"] != label:
            self.spans.append({"version": label, "start": self.spans[-1]["end"], "end": 0})
        self.spans[-1]["end"] = self.sent
        meta: dict[str, Any] = {
            "finish_reason": reason,
            "completion_tokens": self.sent,
            "weight_version": label,
            "output_token_logprobs": [[-float(token_id), token_id, None] for token_id in ids],
        }
        if reason:
            meta["weight_versions"] = self.spans
        if reason and self.body.get("return_routed_experts"):
            meta["routed_experts"] = self._experts()
        meta = {name: value for name, value in meta.items() if name not in omit}
        message = {"output_ids": ids, "meta_info": meta}
        kept = {name: value for name, value in message.items() if name not in omit}
        return b"data: " + json.dumps(kept).encode() + b"\n\n"

    def _experts(self) -> str:
        """Of two layers with two choices: the index of the pass, modulo 8."""
        last = len(self.body["input_ids"]) + self.sent - 1
        passes = range(self.body["routed_experts_start_len"], last)
        ids = array("i", [index % 8 for index in passes for _ in range(4)])
        return base64.b64encode(ids.tobytes()).decode()


class StubSGLang:
    """One server; `calls` is every control call in order, `requests` every request."""

    def __init__(self) -> None:
        """Runs freely until `gate` is cleared."""
        self.label = "default"
        self.returns_experts = False
        self.calls: list[str] = []
        self.loaded: list[str] = []
        """Labels of all weights that were loaded."""
        self.handles: list[str] = []
        """Of tensors in shared memory."""
        self.requests: list[StubRequest] = []
        self.running: list[StubRequest] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.refuse: list[str] = []
        """Control calls to reject, once for each occurrence."""
        self.omit: set[str] = set()
        """Fields that are left out of messages."""
        self.device, self.memory_saver = "cuda", True
        self.freed_part = 1.0
        """What a release frees of its weights and cache."""
        self.used_bytes = OTHER_BYTES + HELD_BYTES
        """In use on its device."""
        self.late_control: asyncio.Event | None = None
        """When set, the scheduler answers no control call until it is."""
        self.late: asyncio.Event | None = None
        """When set, new requests are not known to the scheduler until it is."""

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Stream a request."""
        running = StubRequest(await request.json(), self.label)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        self.requests.append(running)
        await response.prepare(request)
        if self.late is not None:
            await self.late.wait()
        self.running.append(running)
        try:
            await self._stream(running, response)
        finally:
            self.running.remove(running)
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _stream(self, running: StubRequest, response: web.StreamResponse) -> None:
        wanted = running.body["sampling_params"]["max_new_tokens"]
        while True:
            await asyncio.sleep(0)
            if running.aborted.is_set():
                aborted = {"type": "abort", "message": "Aborted"}
                await response.write(running.message(1, self.label, aborted, self.omit))
                return
            if self.gate.is_set():
                count = min(INTERVAL, wanted - running.sent)
                last = running.sent + count == wanted
                reason = {"type": "length", "length": wanted} if last else None
                await response.write(running.message(count, self.label, reason, self.omit))
                if last:
                    return
            await asyncio.sleep(0.001)

    async def control(self, request: web.Request) -> web.Response:
        """Everything else."""
        path, body = request.path[1:], await request.json() if request.can_read_body else {}
        self.calls.append(path)
        if self.late_control is not None and path not in ("model_info", "ready"):
            await self.late_control.wait()
        if path in self.refuse:
            self.refuse.remove(path)
            return web.json_response({"success": False, "message": "no"}, status=400)
        if path == "abort_request":
            for running in self.running:
                if body.get("abort_all") or running.body["rid"].startswith(body["rid"]):
                    running.aborted.set()
        if path == "flush_cache" and self.running:
            return web.Response(text="busy", status=400)
        if path in ("update_weights_from_disk", "update_weights_from_tensor"):
            self.label = body["weight_version"]
            self.loaded.append(self.label)
            self.handles += body.get("serialized_named_tensors", [])
        if path == "release_memory_occupation":
            assert not self.running, "SGLang crashes"
            self.used_bytes -= int(self.freed_part * HELD_BYTES)
            return web.json_response(None)
        if path == "resume_memory_occupation":
            self.used_bytes = OTHER_BYTES + HELD_BYTES
            return web.json_response(None)
        return web.json_response(self.facts())

    async def measure(self) -> int:
        """What nvidia-smi would say."""
        return self.used_bytes

    def facts(self) -> dict[str, Any]:
        """Of /model_info and /server_info."""
        usage = {"weight": 2.0, "kvcache": 6.0}
        return {
            "device": self.device,
            "enable_memory_saver": self.memory_saver,
            "tp_size": 1,
            "pp_size": 1,
            "dp_size": 1,
            "enable_dp_attention": False,
            "weight_version": self.label,
            "enable_deterministic_inference": False,
            "max_req_input_len": 400,
            "max_running_requests": 4,
            "internal_states": [{"memory_usage": usage}],
            "enable_return_routed_experts": self.returns_experts,
        }

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Serve on a free port; gives the URL."""
        app = web.Application()
        app.router.add_post("/generate", self.generate)
        app.router.add_route("*", "/{path}", self.control)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            host, port = runner.addresses[0]
            yield f"http://{host}:{port}"
        finally:
            await runner.cleanup()
