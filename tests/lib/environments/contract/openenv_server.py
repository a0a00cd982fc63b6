"""A small environment of OpenEnv on its own server: guess a number, with faults on request.

.venv-adapters/openenv/bin/python -m tests.lib.environments.contract.openenv_server --port N
"""

from __future__ import annotations

import argparse
import os
import random
import threading
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    """What an answer says."""

    text: str


class Told(Observation):
    """What the player is told."""

    text: str = ""


class Guessing(Environment[Guess, Told, State]):
    """Guess a number from 1 to 9, in three answers. Texts name the faults."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Told:
        """The question."""
        self._number = random.Random(seed).randint(1, 9)
        self._num_answers = 0
        return Told(text=f"Guess a number from 1 to 9. It is not {self._number % 9 + 1}.")

    def step(self, action: Guess, timeout_s: float | None = None, **kwargs: Any) -> Told:
        """Higher or lower; a reward is a bool, and null before the end."""
        self._num_answers += 1
        if action.text == "raise":
            raise RuntimeError("no disk")
        if action.text == "die":
            os._exit(1)
        if action.text.strip() == str(self._number):
            return Told(text="right", reward=True, done=True)
        is_last = self._num_answers == 3
        hint = self._hint(action.text.strip())
        return Told(text=hint, reward=False if is_last else None, done=is_last)

    def _hint(self, text: str) -> str:
        if text not in list("123456789"):
            return "Answer with a number."
        return "higher" if int(text) < self._number else "lower"

    @property
    def state(self) -> State:
        """Nothing."""
        return State()


def main() -> None:
    """Serve until killed; the first line on stdout says that it listens."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--max-sessions", type=int, default=16)
    options = parser.parse_args()
    app = create_fastapi_app(Guessing, Guess, Told, max_concurrent_envs=options.max_sessions)
    server = uvicorn.Server(uvicorn.Config(app, port=options.port, log_level="warning"))
    threading.Thread(target=_announce, args=(server,), daemon=True).start()
    server.run()


def _announce(server: uvicorn.Server) -> None:
    while not server.started:
        threading.Event().wait(0.05)
    print("listening", flush=True)


main()
