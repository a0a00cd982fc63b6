"""GPUs of a run's processes: no two nodes share one, and each rank and server has its own."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest

from rollout.server.config import RolloutServerConfig
from rollout.server.engines.sglang.command_line import command_line, num_devices
from services.launcher.child_process import ProcessPlan
from services.launcher.config import LauncherConfig
from services.launcher.layout import places
from services.launcher.node_plan import node_plan
from services.launcher.process_plan import plan
from tests.lib.launcher.support import make_config, make_layout

VISIBLE = "CUDA_VISIBLE_DEVICES"


def plans(config: LauncherConfig, folder: Path) -> dict[str, ProcessPlan]:
    """All processes of a run."""
    return plan(config, make_layout(config, folder))


def owners(processes: dict[str, ProcessPlan]) -> dict[str, list[set[str]]]:
    """The GPUs of each process that computes by itself: of a trainer those of each rank."""
    found: dict[str, list[set[str]]] = {}
    for name, each in processes.items():
        if VISIBLE in each.environment:
            gpus = [gpu for gpu in each.environment[VISIBLE].split(",") if gpu]
            ranks = (
                each.command[each.command.index("torch.distributed.run") :]
                if ("torch.distributed.run" in each.command)
                else ()
            )
            number = next(
                (int(flag.split("=")[1]) for flag in ranks if flag.startswith("--nproc-per-node=")),
                0,
            )
            found[name] = [{gpu} for gpu in gpus[:number]] if number else [set(gpus)]
    return found


@pytest.mark.parametrize(
    "nodes",
    [
        (*(f"n{gpu}: rollout; gpus {gpu}" for gpu in range(7)), "t: train; gpus 7"),
        ("a: rollout; gpus 0-3", "b: train; gpus 4-7"),
        ("a: rollout; gpus 0-3; servers 4", "b: train; gpus 4-7"),
        ("a: rollout; gpus 0-5; servers 3", "b: train; gpus 6,7"),
        ("a: rollout; gpus 1,3,5", "b: train; gpus 0, 2, 4", "c: rollout; gpus 6-7; servers 2"),
        ("a: rollout; gpus 0-1", "b: train; gpus 2,3", "c: train; gpus 4-5", "d: train; gpus 6-7"),
    ],
)
def test_processes_of_one_machine_have_disjoint_gpus(
    nodes: tuple[str, ...], tmp_path: Path
) -> None:
    """Pairwise, over all rollout servers and ranks; together they have all 8 or fewer."""
    spares = {"trainer_nodes": 2} if sum("train" in node for node in nodes) > 1 else {}
    found = owners(plans(make_config(nodes=nodes, **spares), tmp_path))
    sets = [gpus for each in found.values() for gpus in each]
    assert all(gpus and gpus <= set("01234567") for gpus in sets)
    assert all(not one & other for one, other in itertools.combinations(sets, 2))
    given = {str(gpu) for node in nodes for gpu in node_plan(node).gpus}
    assert set().union(*sets) == given


ON_HOSTS = (
    "a: rollout; gpus 0-3; servers 4",
    "b: train; gpus 4-7",
    "c: rollout; gpus 0-3; servers 2; host 1",
    "d: train; gpus 4-7; host 1",
    "e: rollout; gpus 0-7; servers 8; host 2",
)


def test_processes_of_each_host_have_disjoint_gpus(tmp_path: Path) -> None:
    """Each host counts its own from 0; together its processes have all 8."""
    hosts = ("10.0.0.1", "10.0.0.2", "10.0.0.3")
    config = make_config(nodes=ON_HOSTS, trainer_nodes=2, hosts=("127.0.0.1", *hosts[1:]))
    config, layout = config.replace(hosts=hosts), make_layout(config, tmp_path)
    processes = plan(config, replace(layout, hosts=hosts, places=places(config)))
    for host in range(3):
        found = owners({name: each for name, each in processes.items() if each.host == host})
        sets = [gpus for each in found.values() for gpus in each]
        assert all(not one & other for one, other in itertools.combinations(sets, 2))
        assert set().union(*sets) == set("01234567")


@pytest.mark.parametrize(
    ("nodes", "hosts", "message"),
    [
        (("a: rollout train; host 1",), (), "'a' is on host 1, and hosts has 0"),
        (("a: rollout", "b: train; host 2"), ("x", "y"), "'b' is on host 2, and hosts has 2"),
        (("a: rollout train",), ("x", "y"), "hosts: 'y' has no node: give one '; host 1'"),
        (("a: rollout", "b: train; host 1"), ("x", "x"), "one is named twice"),
        (
            ("a: rollout; gpus 0; host 1", "b: train; gpus 0; host 1", "c: rollout"),
            ("x", "y"),
            "'a' and 'b' both have GPU 0",
        ),
    ],
)
def test_hosts_that_do_not_fit_are_refused(
    nodes: tuple[str, ...], hosts: tuple[str, ...], message: str
) -> None:
    """With node, host and the cure."""
    with pytest.raises(ValueError, match=message):
        make_config(nodes=nodes, hosts=hosts)


def test_workers_of_one_node_share_its_gpus_in_turn(tmp_path: Path) -> None:
    """Servers and ranks have one GPU each of the same four; the node agent knows them all."""
    nodes = ("a: rollout train; gpus 4-7; servers 4", "b: rollout; gpus 0")
    processes = plans(make_config(nodes=nodes), tmp_path)
    found = owners(processes)
    servers = [found[f"rollout_server-a.{index}"] for index in range(4)]
    assert servers == [[{str(gpu)}] for gpu in range(4, 8)]
    assert found["trainer"] == [{str(gpu)} for gpu in range(4, 8)]
    assert processes["trainer"].environment["SEAMFLOW_TRAINER_DEVICE"] == "cuda"
    agent = processes["node_agent-a"].environment
    assert agent["SEAMFLOW_NODE_AGENT_GPUS"] == "4,5,6,7"
    addresses = [
        f"127.0.0.1:{processes[f'rollout_server-a.{index}'].environment['SEAMFLOW_ROLLOUT_SERVER_PORT']}"
        for index in range(4)
    ]
    assert agent["SEAMFLOW_NODE_AGENT_ROLLOUT_SERVER"] == addresses[0]
    others = json.loads(agent["SEAMFLOW_NODE_AGENT_WORKERS"])
    assert others == [{"tag": "rollout", "address": address} for address in addresses[1:]]


def test_a_process_on_no_gpu_sees_none(tmp_path: Path) -> None:
    """Or it would start on GPU 0, which is another's."""
    nodes = ("a: rollout; gpus 0", "b: train")
    processes = plans(make_config(nodes=nodes, reference="m"), tmp_path)
    assert processes["trainer"].environment[VISIBLE] == ""
    assert processes["scoring"].environment[VISIBLE] == ""
    assert "SEAMFLOW_TRAINER_DEVICE" not in processes["trainer"].environment


def test_without_gpus_nothing_is_assigned(tmp_path: Path) -> None:
    """Processes see what the launcher sees."""
    processes = plans(make_config(nodes=("a: rollout", "b: rollout train")), tmp_path)
    assert not any(VISIBLE in each.environment for each in processes.values())


@pytest.mark.parametrize(
    ("nodes", "ranks", "message"),
    [
        (("a: rollout; gpus 0-3", "b: train; gpus 3"), 0, "'a' and 'b' both have GPU 3"),
        (("a: rollout; gpus 0,0", "b: train; gpus 1"), 0, "a GPU is named twice"),
        (("a: rollout; gpus 0", "b: train; gpus 1"), 2, "trainer_ranks is 2 and node 'b' has 1"),
        (("a: rollout; gpus 0", "b: train"), 1, "trainer_ranks is 1 and node 'b' has 0 GPUs"),
        (("a: rollout; gpus 0-2; servers 2", "b: train"), 0, "2 servers cannot share 3 GPUs"),
        (("a: rollout; gpus 0; servers 8", "b: train"), 0, "8 servers cannot share 1 GPUs"),
        (("a: rollout", "b: train; gpus 0; servers 2"), 0, "servers are for the tag 'rollout'"),
        (("a: rollout; gpu 0", "b: train"), 0, "write 'name: tags"),
        (
            ("a: rollout", "b: train; gpus 0", "c: train; gpus 1-2"),
            0,
            "those that train have 1, 2 GPUs",
        ),
    ],
)
def test_gpus_that_do_not_fit_are_refused(nodes: tuple[str, ...], ranks: int, message: str) -> None:
    """With nodes, numbers and the cure."""
    with pytest.raises(ValueError, match=message):
        make_config(nodes=nodes, trainer_ranks=ranks)


@pytest.mark.parametrize(
    ("num_gpus", "flags", "expected"),
    [
        (4, (), ["--tp-size", "4"]),
        (1, (), ["--tp-size", "1"]),
        (4, ("--tp-size", "4"), []),
        (4, ("--tp=2", "--dp-size=2"), []),
        (4, ("--dp-size", "2"), ["--tp-size", "2"]),
        (8, ("--pp-size", "2", "--dp-size", "2"), ["--tp-size", "2"]),
        (4, ("--dp-size", "4", "--enable-dp-attention"), ["--tp-size", "4"]),
        (0, ("--tp-size", "2"), []),
        (0, (), []),
    ],
)
def test_sglang_computes_over_all_gpus_of_its_server(
    num_gpus: int, flags: tuple[str, ...], expected: list[str], tmp_path: Path
) -> None:
    """Unless its flags divide them; the forecast counts the same devices."""
    config = RolloutServerConfig(model=tmp_path, num_gpus=num_gpus, sglang_flags=flags)
    command = command_line(config)
    ours = command[command.index("warning") + 1 + len(flags) :]
    assert [part for part in ours if part in expected] == expected
    assert ("--tp-size" in ours) == bool(expected)
    assert num_devices(config) == (num_gpus or (2 if flags else 1))


@pytest.mark.parametrize("flags", [("--tp-size", "2"), ("--dp-size", "3"), ("--dp=8",)])
def test_flags_for_other_gpus_than_assigned_are_refused(
    flags: tuple[str, ...], tmp_path: Path
) -> None:
    """Too few leave GPUs idle, too many fail in SGLang."""
    config = RolloutServerConfig(model=tmp_path, num_gpus=4, sglang_flags=flags)
    with pytest.raises(ValueError, match=r"sglang_flags: .*4 GPUs of this server"):
        command_line(config)


def test_a_rollout_server_lends_the_device_of_a_node_with_other_work(tmp_path: Path) -> None:
    """So that its engine is started to free it, and checked that it does."""
    config = make_config(
        nodes=("a: rollout", "b: rollout train", "c: rollout score"), reference="m"
    )
    processes = plan(config, make_layout(config, tmp_path))
    lends = {
        node: processes[f"rollout_server-{node}"].environment[
            "SEAMFLOW_ROLLOUT_SERVER_LENDS_DEVICE"
        ]
        for node in "abc"
    }
    assert lends == {"a": "false", "b": "true", "c": "true"}
