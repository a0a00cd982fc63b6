"""Configuration: sources, types, secrets, and mistakes that name their cure."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from pydantic import Field, SecretStr

from services.chassis.config.load import ConfigError, UsageError, load
from services.chassis.config.settings import ServerConfig
from services.chassis.errors import ExitCode
from tests.lib.chassis.support import DemoConfig


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ignore the settings in the environment of the test run."""
    for name in list(os.environ):
        if name.startswith("SEAMFLOW_"):
            monkeypatch.delenv(name)


def _file(folder: Path, text: str) -> str:
    path = folder / "seamflow.toml"
    path.write_text(text)
    return str(path)


def test_flag_beats_environment_beats_file_beats_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several sources the one closest to the person wins."""
    path = _file(tmp_path, '[demo]\nport = 1\nadmin_port = 1\ninstance = "file"\n')
    monkeypatch.setenv("SEAMFLOW_DEMO_PORT", "2")
    monkeypatch.setenv("SEAMFLOW_DEMO_ADMIN_PORT", "2")
    config = load(DemoConfig, "demo", ["--config", path, "--port=3"])
    assert (config.port, config.admin_port, config.instance) == (3, 2, "file")
    assert config.host == "127.0.0.1"


def revealed(secret: SecretStr | None) -> str | None:
    """The secret itself."""
    return secret.get_secret_value() if secret else None


def test_nested_tables_are_set_value_by_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """File, variable and flag may each set another field of the same nested table."""
    path = _file(tmp_path, '[demo.inner]\nstep = 2\nname = "file"\nratio = 0.1')
    monkeypatch.setenv("SEAMFLOW_DEMO_INNER__NAME", "variable")
    inner = load(DemoConfig, "demo", ["--config", path, "--inner.ratio=0.5"]).inner
    assert (inner.step, inner.name, inner.ratio) == (2, "variable", 0.5)


def test_every_type_is_read_from_text_and_from_toml(tmp_path: Path) -> None:
    """Lists, numbers, paths, choices and optional values arrive typed from both kinds of source."""
    certificate = _file(tmp_path, "")
    text = ["--names=a,b", "--rate=0.5", "--limit=", "--development", "--admin-port", "-1"]
    config = load(DemoConfig, "demo", text)
    assert (config.names, config.rate, config.limit) == (("a", "b"), 0.5, None)
    assert (config.development, config.admin_port) == (True, -1)
    toml = f'[demo]\nnames=["a"]\nrate=1\nlimit=4\nlog_level="debug"\ntls_ca_file="{certificate}"'
    config = load(DemoConfig, "demo", ["--config", _file(tmp_path, toml)])
    assert (config.names, config.rate, config.limit) == (("a",), 1.0, 4)
    assert (config.log_level, config.tls_ca_file) == ("debug", Path(certificate))


def test_a_switch_can_be_turned_off_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--no-development` overrides the environment."""
    monkeypatch.setenv("SEAMFLOW_DEMO_DEVELOPMENT", "true")
    assert load(DemoConfig, "demo", []).development
    assert not load(DemoConfig, "demo", ["--no-development"]).development
    assert not load(DemoConfig, "demo", ["--development=false"]).development
    assert load(DemoConfig, "demo", ["--development=true"]).development


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("[demo]\nprot = 1", r"\[demo\] prot: unknown key; did you mean port\?"),
        ("[demo.inner]\nsteps = 1", r"\[demo.inner\] steps: unknown key; did you mean step\?"),
        (
            "[demo.inner]\nstep = 0",
            r"\[demo.inner\] step: inner.step is 0: input should",
        ),
        ("[scheduller]\nport = 1", r"unknown table \[scheduller\]; did you mean scheduler\?"),
        ('[demo]\nport = "one"', r"port is 'one': input should be a valid integer"),
        ("[demo]\nnames = [1]", r"names.0 is 1: input should be a valid string"),
        ('[demo]\nlog_level = "loud"', r"should be 'debug', 'info', 'warning' or 'error'"),
        ("[demo]\nrate = -1", r"rate is -1: input should be greater than or equal to 0"),
        ("[demo]\nrate = inf", r"rate is inf: input should be a finite number"),
        ("[demo\n", r"seamflow\.toml: "),
        ("x = " + "[" * 2000 + "]" * 2000, r"seamflow\.toml: is nested too deeply"),
        (f"[demo]\nport = {'1' * 5000}", r"seamflow\.toml: Exceeds the limit"),
        ("#" * (4 << 20) + "\n", r"seamflow\.toml: has more than 4 MiB"),
    ],
)
def test_a_mistake_in_the_file_names_the_key_and_the_cure(
    tmp_path: Path, toml: str, message: str
) -> None:
    """No wrong key, table, type or value passes."""
    with pytest.raises(ConfigError, match=message):
        load(DemoConfig, "demo", ["--config", _file(tmp_path, toml)])


@pytest.mark.parametrize("file", ["/dev/zero", "pipe"])
def test_what_is_no_regular_file_is_refused(tmp_path: Path, file: str) -> None:
    """It would never end, or never begin."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="is no regular file"):
        load(DemoConfig, "demo", ["--config", str(tmp_path / file)])


def test_tables_of_other_processes_are_left_to_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One file and one environment serve all processes."""
    monkeypatch.setenv("SEAMFLOW_SCHEDULER_PORT", "7")
    monkeypatch.setenv("SEAMFLOW_RUN", "7")
    path = _file(tmp_path, "[trainer]\nanything = 1\n[demo]\nport = 2\n")
    assert load(DemoConfig, "demo", ["--config", path]).port == 2


@pytest.mark.parametrize(
    ("variable", "nearest"),
    [
        ("SEAMFLOW_DEMO_PROT", "SEAMFLOW_DEMO_PORT"),
        ("SEAMFLOW_DEMO_TOKEN_FIL", "SEAMFLOW_DEMO_TOKEN_FILE"),
        ("SEAMFLOW_DEMO_INNER__STEPP", "SEAMFLOW_DEMO_INNER__STEP"),
    ],
)
def test_an_unknown_variable_is_ignored_with_a_warning(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    variable: str,
    nearest: str,
) -> None:
    """A misspelt variable ends no process, but is seen; a right one beside it counts."""
    monkeypatch.setenv(variable, "1")
    monkeypatch.setenv("SEAMFLOW_DEMO_INNER__RATIO", "0.5")
    config = load(DemoConfig, "demo", [])
    assert config.inner == DemoConfig().inner.replace(ratio=0.5)
    assert capsys.readouterr().err == (
        f"demo: warning: {variable} names no setting and is ignored; did you mean {nearest}?\n"
    )


SERVICE_LINKS = {
    "SEAMFLOW_DEMO_PORT": "tcp://10.0.0.1:50051",
    "SEAMFLOW_DEMO_PORT_50051_TCP": "tcp://10.0.0.1:50051",
    "SEAMFLOW_DEMO_PORT_50051_TCP_ADDR": "10.0.0.1",
    "SEAMFLOW_DEMO_PORT_50051_TCP_PORT": "50051",
    "SEAMFLOW_DEMO_PORT_50051_TCP_PROTO": "tcp",
    "SEAMFLOW_DEMO_SERVICE_HOST": "10.0.0.1",
    "SEAMFLOW_DEMO_SERVICE_PORT": "50051",
    "SEAMFLOW_DEMO_SERVICE_PORT_GRPC": "50051",
}
"""What Kubernetes gives each pod for a service `seamflow-demo`."""


def test_what_kubernetes_adds_for_a_service_is_no_setting(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The port stays the configured one, and nobody is warned."""
    for variable, value in SERVICE_LINKS.items():
        monkeypatch.setenv(variable, value)
    assert load(DemoConfig, "demo", []).port == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("SEAMFLOW_DEMO_PORT", "10.0.0.1:50051")
    with pytest.raises(ConfigError, match=r"SEAMFLOW_DEMO_PORT: port is '10\.0\.0\.1:50051'"):
        load(DemoConfig, "demo", [])


def test_an_unknown_flag_is_a_usage_error() -> None:
    """A misspelt flag names its nearest neighbour, and no flag can be abbreviated."""
    with pytest.raises(UsageError, match=r"--prot=1; did you mean --port\?"):
        load(DemoConfig, "demo", ["--prot=1"])
    with pytest.raises(UsageError, match="did you mean --instance"):
        load(DemoConfig, "demo", ["--inst", "1"])
    with pytest.raises(UsageError, match="expected one argument"):
        load(DemoConfig, "demo", ["--port"])


def test_a_secret_comes_from_a_mounted_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`..._FILE` and `--...-file` read the secret and drop the final newline."""
    path = tmp_path / "token"
    path.write_text("s3cret\n")
    assert revealed(load(DemoConfig, "demo", ["--token-file", str(path)]).token) == "s3cret"
    monkeypatch.setenv("SEAMFLOW_DEMO_TOKEN_FILE", str(path))
    assert revealed(load(DemoConfig, "demo", []).token) == "s3cret"
    with pytest.raises(ConfigError, match="give one of them"):
        load(DemoConfig, "demo", ["--token-file", str(path), "--token=other"])
    path.write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        load(DemoConfig, "demo", [])


def test_a_secret_never_shows_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the printed configuration nor the object's repr holds a secret."""
    monkeypatch.setenv("SEAMFLOW_DEMO_PASSWORD", "s3cret")
    config = load(DemoConfig, "demo", [])
    assert revealed(config.password) == "s3cret"
    assert "s3cret" not in repr(config) + str(config.model_dump())
    with pytest.raises(ConfigError) as refused:
        load(DemoConfig, "demo", ["--password=s3cret", "--rate=-1"])
    assert "s3cret" not in str(refused.value)


def test_beyond_loopback_plaintext_must_be_asked_for() -> None:
    """A process that others can reach needs TLS and a token, or the word `development`."""
    with pytest.raises(ConfigError, match="reachable from other machines"):
        load(ServerConfig, "demo", ["--host=0.0.0.0"])
    assert load(ServerConfig, "demo", ["--host=0.0.0.0", "--development"]).host == "0.0.0.0"


def test_half_a_key_pair_is_an_error(tmp_path: Path) -> None:
    """A certificate without its key would mean plaintext."""
    with pytest.raises(ConfigError, match="together or not at all"):
        load(ServerConfig, "demo", ["--tls-cert-file", _file(tmp_path, "")])


def test_help_documents_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    """--help shows the docstring under each field, inherited ones too."""
    with pytest.raises(SystemExit) as stopped:
        load(DemoConfig, "demo", ["--help"])
    assert stopped.value.code == ExitCode.CLEAN
    shown = " ".join(capsys.readouterr().out.split())
    assert "--rate float A number. (default: 1.0)" in shown
    assert "Time that calls in flight get to finish after SIGTERM." in shown
    assert "--token-file" in shown


class PassingConfig(ServerConfig):
    """A process that starts another program."""

    other_flags: tuple[str, ...] = Field(default=(), json_schema_extra={"flags": "other"})
    """Flags of the other program."""
    other_url: str | None = None
    """A flag of ours that begins alike."""


def test_flags_of_another_program_are_passed_on(tmp_path: Path) -> None:
    """--PREFIX-FLAG and its values go to the field that collects them; ours stay ours."""
    command = ["--other-size", "2", "--port", "1", "--other-list=[1,2]", "--other-quiet"]
    config = load(PassingConfig, "demo", [*command, "--other-range", "-1", "5"])
    expected = ("--size", "2", "--list=[1,2]", "--quiet", "--range", "-1", "5")
    assert (config.other_flags, config.port) == (expected, 1)
    config = load(PassingConfig, "demo", ["--other-url", "x"])
    assert (config.other_flags, config.other_url) == ((), "x")
    path = _file(tmp_path, '[demo]\nother_flags = ["--size", "2"]')
    assert load(PassingConfig, "demo", ["--config", path]).other_flags == ("--size", "2")
    with pytest.raises(ConfigError, match="--other-flags and its flags one by one"):
        load(PassingConfig, "demo", ["--other-flags=size", "--other-size", "2"])
    with pytest.raises(UsageError, match="unknown argument --othr-size"):
        load(PassingConfig, "demo", ["--othr-size", "2"])
