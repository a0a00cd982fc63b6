"""A harness without a program: it asks the policy once with the task's prompt."""

from __future__ import annotations

from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI


class ChatHarness(vf.Harness[vf.HarnessConfig]):
    """One chat completion in this process; tools are not offered."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """Ask, and end well: verifiers has recorded the answer on its way."""
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=2) as client:
            await client.chat.completions.create(model=ctx.model, messages=self._messages(data))
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")

    def _messages(self, data: vf.TaskData) -> Any:
        system, prompt = self.resolve_prompt(data)
        asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt or []
        plain = [m if isinstance(m, dict) else m.model_dump(exclude_none=True) for m in asked]
        return [{"role": "system", "content": system}, *plain] if system else plain
