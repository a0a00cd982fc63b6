"""A minimal agent that uses only the client: generate two turns, then report a reward.

    python examples/minimal_agent.py 127.0.0.1:50052 my-run [FOLDER_OF_CREDENTIALS]

After `make up` the run is called quickstart and the folder is runs/compose/agent.
Its rollout is recorded, not trained; leased tasks, as `seamflow.runner` takes them, are trained.
"""

import asyncio
import sys

from seamflow import Client, Credentials, SamplingParams


async def main(gateway: str, run_id: str, folder: str | None = None) -> None:
    """One rollout of two turns."""
    credentials = Credentials.from_folder(folder) if folder else None
    async with Client(gateway, run_id=run_id, credentials=credentials) as client:
        rollout = await client.start_rollout()
        question = {"role": "user", "content": "2 + 2 = ?"}
        first = await rollout.generate([question], SamplingParams(max_new_tokens=32))
        doubt = {"role": "user", "content": "Are you sure?"}
        messages = [question, first.message, doubt]
        second = await rollout.generate(messages, SamplingParams(max_new_tokens=32))
        await rollout.finish(float("4" in second.text))
        print(f"{first.text!r}, then {second.text!r}, sampled by {second.spans}")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:4]))
