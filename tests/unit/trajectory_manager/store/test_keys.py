"""Every Lua script touches one cluster slot: its keys are declared and hash to the same one."""

from __future__ import annotations

import re

from redis.crc import key_slot

from trajectory_manager.store.redis import keys
from trajectory_manager.store.redis.connect import SCRIPTS

ROLLOUT_SCRIPTS = {
    "start_rollout",
    "begin_turn",
    "read_newest_turn",
    "read_tokens",
    "append_tokens",
    "finish_rollout",
    "record_rollout",
    "write_cell",
    "read_cells",
    "delete_rollout",
}
NAMES = ("run", "a/7/1")


def key_sets() -> dict[str, tuple[str, ...]]:
    """The KEYS that each script is called with."""
    run_id, rollout_id = NAMES
    of_rollout, of_run = keys.deleted_keys(run_id, rollout_id), keys.run_keys(run_id)
    found = {
        path.stem: of_rollout if path.stem in ROLLOUT_SCRIPTS else of_run
        for path in SCRIPTS.glob("[!_]*.lua")
    }
    return found | {"record_trained": (*of_run, *keys.trained_keys(run_id, 7))}


def test_the_keys_of_each_script_share_a_slot() -> None:
    """Token scripts stay with their rollout, run scripts with their run."""
    for script, names in key_sets().items():
        assert len({key_slot(name.encode()) for name in names}) == 1, script
        assert len(set(names)) == len(names), script


def test_scripts_use_declared_keys_only() -> None:
    """Each key is named in keys.py and reaches Lua through KEYS."""
    for path in SCRIPTS.glob("*.lua"):
        assert "sf:" not in path.read_text(), path.name
        source = path.read_text().replace("'INFO', 'server'", "")
        assert not re.search(r"redis\.call\('\w+', '", source), path.name


def test_tokens_of_different_rollouts_spread() -> None:
    """A run is not bound to one node of a cluster."""
    slots = {key_slot(keys.rollout_keys("run", f"a/{i}/1")[0].encode()) for i in range(64)}
    assert len(slots) > 32
