"""The batch script of a run: what it asks for, what it starts, and what it refuses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from services.chassis.errors import ConfigError, StartupError
from services.launcher.hosts import slurm
from services.lib.model_files.weight_headers import Header

NODES = (
    "a: rollout; gpus 0-3; servers 4",
    "b: train; gpus 4-7",
    "c: rollout; gpus 0-7; servers 8; host 1",
)


def script(folder: Path, *arguments: str, nodes: tuple[str, ...] = NODES) -> str:
    """The script for a file with these nodes."""
    file = folder / "run.toml"
    listed = ", ".join(f'"{node}"' for node in nodes)
    file.write_text(
        f'[launcher]\nname = "big"\nmodel = "m"\ntasks = "t.jsonl"\nagent = "a:B"\n'
        f"nodes = [{listed}]\n"
    )
    given, others = slurm._parser().parse_known_args(["--config", str(file), *arguments])
    return slurm.script_of(given, others)


def directives(text: str) -> dict[str, str]:
    """The lines for sbatch."""
    found = re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", text, re.MULTILINE)
    return dict(found)


def test_a_job_has_a_machine_for_each_host_with_all_its_gpus(tmp_path: Path) -> None:
    """It gets a signal before its end, and is requeued."""
    asked = directives(script(tmp_path, "--time", "4:00:00", "--partition", "gpu"))
    assert (asked["nodes"], asked["gpus-per-node"], asked["ntasks-per-node"]) == ("2", "8", "1")
    assert asked["signal"] == "B:USR1@120"
    assert asked.keys() >= {"requeue", "exclusive", "open-mode"}
    assert (asked["time"], asked["partition"]) == ("4:00:00", "gpu")


def test_steps_of_the_job_are_on_machines_of_their_own(tmp_path: Path) -> None:
    """Host 0 trains, one other step joins for each further machine; none divides GPUs itself."""
    text = script(tmp_path)
    assert text.count('"$SEAMFLOW" train') == text.count('"$SEAMFLOW" join') == 1
    steps = re.findall(r'--nodelist="\$\{HOSTS\[(\w)\]\}"', text)
    assert steps == ["0", "i", "0"]
    assert "for ((i = 1; i < ${#HOSTS[@]}; i++))" in text
    assert "CUDA_VISIBLE_DEVICES" not in text


def test_one_machine_needs_no_hosts(tmp_path: Path) -> None:
    """The same script with one node."""
    text = script(tmp_path, nodes=("a: rollout; gpus 0", "b: train; gpus 1"))
    assert directives(text)["nodes"] == "1"
    assert directives(text)["gpus-per-node"] == "2"
    assert "gpus-per-node" not in script(tmp_path, nodes=("a: rollout train",))


def test_further_flags_are_those_of_train(tmp_path: Path) -> None:
    """Quoted, so that the shell leaves them as they are."""
    text = script(tmp_path, "--name", "other", "--set", "trainer.num_steps=5")
    assert "SETTINGS=(--name other --set trainer.num_steps=5)" in text
    assert f"RUN={Path.cwd() / 'runs/other'}" in text
    (tmp_path / "it's").mkdir()
    assert f"""CONFIG='{tmp_path}/it'"'"'s/run.toml'""" in script(tmp_path / "it's")


def test_a_container_or_a_virtual_environment_runs_it(tmp_path: Path) -> None:
    """By srun --container-image, or its own interpreter."""
    text = script(tmp_path, "--container", "registry#seamflow:1")
    assert "'--container-image=registry#seamflow:1'" in text
    mounts = (Path.cwd(), tmp_path, Path.cwd() / "runs")
    assert f"--container-mounts={','.join(f'{each}:{each}' for each in mounts)}" in text
    assert f"SEAMFLOW={tmp_path}/v/bin/seamflow" in script(tmp_path, "--venv", f"{tmp_path}/v")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--nodes", "3"), "--nodes is 3, and nodes of .launcher. are on 2 hosts"),
        (("--gpus-per-node", "4"), "--gpus-per-node is 4, .* have GPU 7: give at least 8"),
        (("--time", "soon"), "--time is 'soon': write it as"),
        (("--partition", "a b"), "--partition is 'a b': give a name"),
        (("--container", "i", "--venv", "v"), "--container is 'i' and --venv is 'v': give one"),
        (("--signal-seconds", "0"), "--signal-seconds is 0"),
        (("--sbatch", "qos long"), "--sbatch is 'qos long=': write it as qos=long"),
        (("--setup", "absent.sh"), "--setup 'absent.sh' does not exist"),
        (("--concurrencyy", "3"), "concurrency"),
    ],
)
def test_wrong_values_are_refused(flags: tuple[str, ...], message: str, tmp_path: Path) -> None:
    """With flag, value and the cure."""
    with pytest.raises(StartupError, match=message):
        script(tmp_path, *flags)


def test_directives_and_a_setup_of_the_cluster(tmp_path: Path) -> None:
    """A directive takes the place of the script's own; each further machine has a log."""
    (tmp_path / "setup.sh").write_text("module load cuda\n")
    given = ("qos=long", "constraint=a100", "gpus-per-node=h100:8")
    flags = [flag for each in given for flag in ("--sbatch", each)]
    text = script(tmp_path, *flags, "--setup", f"{tmp_path}/setup.sh")
    found = directives(text)
    assert (found["qos"], found["constraint"]) == ("long", "a100")
    assert found["gpus-per-node"] == "h100:8" and text.count("gpus-per-node") == 1
    assert text.index(f"source {tmp_path}/setup.sh") < text.index("mapfile")
    assert '--output="$NAME-%j-host-$i.log"' in text
    plain = script(tmp_path)
    assert directives(plain)["gpus-per-node"] == "8" and "source " not in plain


def test_the_warning_leaves_time_for_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """12 bytes of each parameter; a model that is not there yet adds nothing."""
    billion = Header(dtype="BF16", shape=(1000, 10**6), file=tmp_path, begin=0, num_bytes=2)
    monkeypatch.setattr(slurm, "read_headers", lambda folder: {"a": billion})
    assert directives(script(tmp_path))["signal"] == "B:USR1@144"
    assert directives(script(tmp_path, "--signal-seconds", "60"))["signal"] == "B:USR1@60"
    monkeypatch.undo()
    assert directives(script(tmp_path))["signal"] == "B:USR1@120"


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    """Before anything is written."""
    given, others = slurm._parser().parse_known_args(["--config", f"{tmp_path}/x.toml"])
    with pytest.raises(ConfigError, match=r"x\.toml' does not exist"):
        slurm.script_of(given, others)
