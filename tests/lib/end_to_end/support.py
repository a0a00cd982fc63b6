"""Real processes of seamflow for end-to-end tests: started, killed, started again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config

from tests.lib.redis_server import free_port

ROOT = Path(__file__).parents[3]
NUM_WORDS = 1024
_START_SECONDS = 60.0
_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


class Process:
    """One process of seamflow on a port that stays the same over restarts."""

    def __init__(self, module: str, table: str, folder: Path, /, **settings: object) -> None:
        self.port = free_port()
        self.module = module
        """What `start` runs."""
        self._folder = folder
        self._name = f"{table}-{self.port}"
        given = {"port": self.port, "admin_port": -1, **settings}
        self._settings = {f"SEAMFLOW_{table}_{k}".upper(): str(v) for k, v in given.items()}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """host:port."""
        return f"127.0.0.1:{self.port}"

    def start(self) -> Self:
        """Start it and wait until it serves."""
        ready = self._folder / f"{self._name}.port"
        ready.unlink(missing_ok=True)
        environment = child_environment({**self._settings, "SEAMFLOW_PORT_FILE": str(ready)})
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", self.module],
                env=environment,
                stdout=log,
                stderr=log,
                cwd=ROOT,
            )
        limit = time.monotonic() + _START_SECONDS
        while not ready.exists():
            assert self._process.poll() is None and time.monotonic() < limit, self._log.read_text()
            time.sleep(0.02)
        assert json.loads(ready.read_text())["port"] == self.port
        return self

    def kill(self) -> None:
        """End it as a crash would."""
        self._end(signal.SIGKILL)

    def stop(self) -> int | None:
        """End it in order; its exit code, None if it did not run."""
        return self._end(signal.SIGTERM)

    def _end(self, number: int) -> int | None:
        code = None
        if self._process is not None:
            self._process.send_signal(number)
            code = self._process.wait(30)
            self._process = None
        return code

    @property
    def _log(self) -> Path:
        return self._folder / f"{self._name}.log"

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """This environment without seamflow settings, with one thread, this tree's code and `extra`."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("SEAMFLOW_")}
    path = os.pathsep.join((str(ROOT / "sdk"), str(ROOT)))
    return {**kept, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": path, **extra}


def make_tokenizer_folder(folder: Path) -> Path:
    """A model folder without weights: enough for a gateway in front of fake engines."""
    words = ["<end>", "<user>", "<assistant>", *(f"w{i}" for i in range(NUM_WORDS - 3))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", unk_token="w0")  # type: ignore[no-untyped-call]
    fast.chat_template = _TEMPLATE
    fast.save_pretrained(folder)
    Qwen3Config(vocab_size=NUM_WORDS).save_pretrained(folder)
    return folder
