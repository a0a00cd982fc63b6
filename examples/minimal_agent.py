"""A minimal agent that uses only the client: generate two turns, then report a reward.

    pip install seamflow && python examples/minimal_agent.py 127.0.0.1:50052 my-run

Its rollout is recorded, not trained; leased tasks, as `seamflow.runner` takes them, are trained.
"""

import asyncio
import sys

from seamflow import Client, SamplingParams


async def main(gateway: str, run_id: str) -> None:
    """One rollout of two turns."""
    async with Client(gateway, run_id=run_id) as client:
        rollout = await client.start_rollout()
        question = {"role": "user", "content": "2 + 2 = ?"}
        first = await rollout.generate([question], SamplingParams(max_new_tokens=32))
        doubt = {"role": "user", "content": "Are you sure?"}
        messages = [question, first.message, doubt]
        second = await rollout.generate(messages, SamplingParams(max_new_tokens=32))
        await rollout.finish(float("4" in second.text))
        print(f"{first.text!r}, then {second.text!r}, sampled by {second.spans}")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:3]))
