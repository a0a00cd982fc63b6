"""Games of TextArena: the policy plays one side, a simple opponent the others."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import textarena
from seamflow.environment import EnvironmentFailed, Step, Task
from seamflow.environment.environment_class import load_object

from adapters.replies import UnreadableAnswers, replies

Opponent = Callable[[str, random.Random], str]
_RANDOM = "random"
_TOO_LONG = re.compile(r"\d{19}")  # games read numbers with int(), which fails for very long ones
_MAX_UNREADABLE = 3


class TextArenaEnvironment:
    """One game by its id. The rewards come at its end; an opponent's illegal move is a failure."""

    max_episodes = 64
    is_seeded = True

    def __init__(
        self,
        env_id: str,
        *,
        num_players: int = 1,
        player: int | None = 0,
        opponent: str = _RANDOM,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Keep what a game is made of.

        Args:
            env_id: Id of the game, such as "TicTacToe-v0"; ids that end with "-raw" do not work.
            num_players: Players of the game.
            player: The policy's place, from 0; None: chosen by the seed.
            opponent: Plays the others: "random" for a move of those that the observation lists, or
                "module:function" of (observation, random.Random) that returns the move.
            kwargs: Keyword arguments of `textarena.make`.

        Raises:
            ValueError: there is no such game, player or function.
        """
        if player is not None and not 0 <= player < num_players:
            raise ValueError(f"player is {player}: must be 0 to {num_players - 1}, or null")
        if env_id not in textarena.envs.registration.ENV_REGISTRY:
            raise ValueError(f"env_id is {env_id!r}: TextArena has no game of this name")
        self.name = f"textarena {env_id}"
        self._env_id = env_id
        self._kwargs = dict(kwargs or {})
        self._num_players = num_players
        self._place = player
        chosen = random_move if opponent == _RANDOM else load_object(opponent, "opponent")
        self._opponent: Opponent = chosen
        self._unreadable = UnreadableAnswers(_MAX_UNREADABLE)

    def reset(self, task: Task, seed: int) -> str:
        """The rules, and the moves of others before the policy's first."""
        self._own_random = OwnRandom(seed)
        self._chance = random.Random(seed)
        self._shown, self._is_done = "", False
        self._player = self._chance.randrange(self._num_players)
        if self._place is not None:
            self._player = self._place
        with self._own_random:
            self._game = textarena.make(self._env_id, **self._kwargs)
            self._game.reset(num_players=self._num_players, seed=seed)
            return self._others() or "The game has ended."

    def step(self, message: Mapping[str, Any]) -> Step:
        """Play the policy's move, then those of the others."""
        if _TOO_LONG.search(message["content"]):
            return self._unreadable.explain(message, "Write no numbers of over 18 digits.")
        with self._own_random:
            if not self._is_done:
                self._is_done, _ = self._game.step(action=message["content"])
            seen = self._others()
            if not self._is_done:
                return Step(messages=replies(message, seen))
            return self._end()

    def _others(self) -> str:
        """Let the others play; what the policy then sees anew."""
        while not self._is_done:
            player, observation = self._game.get_observation()
            if not isinstance(observation, str):
                raise EnvironmentFailed(f"{self._env_id} gives no text: use the id without -raw")
            if player == self._player:
                return self._new_part(observation)
            self._is_done, _ = self._game.step(action=self._opponent(observation, self._chance))
        return ""

    def _new_part(self, observation: str) -> str:
        before, self._shown = self._shown, observation
        new = observation.removeprefix(before).strip("\n")
        return new or observation

    def _end(self) -> Step:
        rewards, info = self._game.close()
        for player, of_player in (info or {}).items():
            if player != self._player and of_player.get("invalid_move"):
                raise EnvironmentFailed(
                    f"the opponent made an illegal move ({of_player.get('reason', '')}): give a "
                    "function that knows the game as `opponent`"
                )
        mine = (info or {}).get(self._player, {})
        reason = str(mine.get("reason", ""))
        if self._player not in (rewards or {}):
            raise EnvironmentFailed(f"{self._env_id} ended without a reward: {rewards!r}")
        return Step(
            rewards=float(rewards[self._player]),
            done=True,
            info={"reason": reason},
            policy_failure=f"illegal move: {reason}" if mine.get("invalid_move") else "",
        )


_LISTED = re.compile(r"(?:available|valid|legal|possible)\s+(?:moves|actions)", re.IGNORECASE)
_MOVE = re.compile(r"\[[^\[\]\n]+\]")


def random_move(observation: str, chance: random.Random) -> str:
    """A move of those that the observation lists last, such as "Available Moves: '[0]', '[1]'".

    Raises:
        EnvironmentFailed: it lists none.
    """
    lists = list(_LISTED.finditer(observation))
    line = observation[lists[-1].end() :].lstrip(": \n").partition("\n")[0] if lists else ""
    moves: list[str] = _MOVE.findall(line)
    if not moves:
        raise EnvironmentFailed(
            "the observation lists no legal moves for the opponent: give a function that knows the "
            f"game as `opponent`; it ends with {observation[-200:]!r}"
        )
    return chance.choice(moves)


_using = threading.Lock()


class OwnRandom:
    """While it is entered, the global random state of Python and numpy is this game's own.

    TextArena draws from the global one of the process. One game at a time: others wait.
    """

    def __init__(self, seed: int) -> None:
        self._state: Any = random.Random(seed).getstate()
        self._numpy_state: Any = np.random.RandomState(seed % 2**32).get_state()

    def __enter__(self) -> None:
        _using.acquire()
        random.setstate(self._state)
        np.random.set_state(self._numpy_state)

    def __exit__(self, *error: object) -> None:
        self._state = random.getstate()
        self._numpy_state = np.random.get_state()
        _using.release()
