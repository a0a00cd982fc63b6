"""Weights over each transport: resumed, checked, made smaller, relayed, fallen back from."""

from __future__ import annotations

import asyncio
import errno
import shutil
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from seamflow.weights.v1 import weight_service_pb2 as pb
from seamflow.weights.v1.weight_service_pb2 import WeightFile

from rollout.server.weights.transport import (
    DamagedChunk,
    DamagedFile,
    Incoming,
    LocalVersion,
    NotVisible,
    for_each_missing,
)
from rollout.server.weights.transports import TransportContext, build_transports
from rollout.server.weights.transports.shard_stream import ShardStream, _Writing
from rollout.server.weights.transports.shared_folder import SharedFolder
from services.chassis.errors import ConfigError
from tests.lib.rollout.server.weights.shard_senders import (
    MIB,
    Sender,
    make_version,
    receiver,
    same_files,
)

BIG = "model.safetensors"


@pytest.fixture
def version(tmp_path: Path) -> LocalVersion:
    """Version 1 of two files, one of six chunks."""
    return make_version(tmp_path / "published")


async def test_a_cut_off_transfer_goes_on_where_it_stopped(
    version: LocalVersion, tmp_path: Path
) -> None:
    """No chunk is sent twice when the sender goes away in the middle."""
    sender = Sender({1: version}, cut_after=4)
    async with receiver(sender, tmp_path / "to", weight_streams=1) as to:
        await ShardStream(to.context).fetch(to.incoming(version))
    assert same_files(version, to.folder)
    assert set(Counter(sender.sent).values()) == {1}
    assert [r.offset for r in sender.requests if r.names == [BIG]] == [0, 3 * MIB]


async def test_a_killed_receiver_goes_on_after_its_restart(
    version: LocalVersion, tmp_path: Path
) -> None:
    """What was verified lies in the partial folder; a write that was cut off is not taken on."""
    sender = Sender({1: version}, cut_after=4)
    big = version.manifest.files[1]
    async with receiver(sender, tmp_path / "to", weight_streams=1) as to:
        fetching = asyncio.create_task(ShardStream(to.context).fetch(to.incoming(version)))
        while len(sender.requests) < 3:  # cut off, and asked again
            await asyncio.sleep(0.001)
        fetching.cancel()
        await asyncio.wait([fetching])
        kept = to.incoming(version).verified(big)
        assert kept >= 3 * MIB
        await ShardStream(to.context).fetch(to.incoming(version))
    assert same_files(version, to.folder)
    assert [r.offset for r in sender.requests if r.names == [BIG]][-1] == kept


async def test_what_another_life_left_wrong_is_fetched_anew(
    version: LocalVersion, tmp_path: Path
) -> None:
    """Control of resuming: a beginning that is not the file's is caught by the SHA-256."""
    sender = Sender({1: version})
    async with receiver(sender, tmp_path / "to") as to:
        incoming = to.incoming(version)
        incoming.part(version.manifest.files[1]).write_bytes(bytes(2 * MIB))
        incoming = to.incoming(version)
        with pytest.raises(DamagedFile, match=BIG):
            await ShardStream(to.context).fetch(incoming)
        assert incoming.verified(version.manifest.files[1]) == 0
        await ShardStream(to.context).fetch(incoming)
    assert same_files(version, to.folder)


async def test_a_flipped_bit_is_refused_and_its_chunk_alone_fetched_again(
    version: LocalVersion, tmp_path: Path
) -> None:
    """The chunk is not written; it and what was under way behind it come again, no more."""
    sender = Sender({1: version}, flip={3 * MIB})
    async with receiver(sender, tmp_path / "to") as to:
        await ShardStream(to.context).fetch(to.incoming(version))
    assert same_files(version, to.folder)
    asked = [request.offset for request in sender.requests if request.names == [BIG]]
    assert asked == [0, 3 * MIB]
    assert all(sender.sent.count((BIG, offset * MIB)) == 1 for offset in range(3))


async def test_a_bit_that_always_flips_is_named(version: LocalVersion, tmp_path: Path) -> None:
    """File, chunk and byte are in the error, and nothing beyond them is on the disk."""
    sender = Sender({1: version}, flip={3 * MIB}, flips_left=99)
    async with receiver(sender, tmp_path / "to") as to:
        incoming = to.incoming(version)
        with pytest.raises(DamagedChunk, match=f"{BIG}, chunk 3, byte {3 * MIB}") as refused:
            await ShardStream(to.context).fetch(incoming)
    error = refused.value
    assert (error.transport, error.file, error.chunk) == ("shard_stream", BIG, 3)
    assert incoming.part(version.manifest.files[1]).stat().st_size == 3 * MIB


async def test_without_the_check_of_chunks_only_the_whole_file_would_tell(
    version: LocalVersion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: with the chunk's checksum ignored the flip is found at the very end."""
    monkeypatch.setattr("services.lib.weight_files.shard_chunks.ShardChunk.intact", True)
    async with receiver(Sender({1: version}, flip={3 * MIB}), tmp_path / "to") as to:
        with pytest.raises(DamagedFile, match="SHA-256"):
            await ShardStream(to.context).fetch(to.incoming(version))


async def test_a_write_that_fails_counts_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was written before the disk was full stays, what came behind it is fetched again."""
    version = make_version(
        tmp_path / "published", 1, **{BIG: np.random.default_rng(1).bytes(13 * MIB)}
    )
    outcomes = iter([None, OSError(errno.ENOSPC, "full")])
    take = _Writing._take

    def failing(writing: _Writing, chunks: list[bytes | memoryview]) -> int:
        if error := next(outcomes, None):
            raise error
        return take(writing, chunks)

    monkeypatch.setattr(_Writing, "_take", failing)
    sender = Sender({1: version})
    async with receiver(sender, tmp_path / "to") as to:
        incoming = to.incoming(version)
        with pytest.raises(OSError, match="full"):
            await ShardStream(to.context).fetch(incoming)
        kept = incoming.verified(version.manifest.files[0])
        assert 0 < kept <= 4 * MIB
        await ShardStream(to.context).fetch(incoming)
    assert same_files(version, to.folder)
    assert [request.offset for request in sender.requests] == [0, kept]


async def test_a_server_that_asks_for_deltas_gets_the_bytes(
    version: LocalVersion, tmp_path: Path
) -> None:
    """A rollout server of 0.2.0 may name a version that it has; it is sent the file as it is."""
    big = version.manifest.files[1]
    request = pb.FetchShardsRequest(run_id="run", weight_version=1, names=[BIG])
    request.accepted_encodings.append(pb.SHARD_ENCODING_DELTA)
    request.base_weight_version, request.base_sha256 = 1, big.sha256
    async with receiver(Sender({1: version}), tmp_path / "to") as to:
        call = to.context.weights.unary_stream(
            "/seamflow.weights.v1.WeightService/FetchShards",
            request_serializer=pb.FetchShardsRequest.SerializeToString,
            response_deserializer=pb.FetchShardsResponse.FromString,
        )(request)
        chunks = [chunk async for chunk in call]
    assert {chunk.encoding for chunk in chunks} == {pb.SHARD_ENCODING_UNSPECIFIED}
    assert b"".join(chunk.data for chunk in chunks) == (version.folder / BIG).read_bytes()


async def test_compressed_chunks_give_the_same_files(tmp_path: Path) -> None:
    """zstd is used where it makes a chunk smaller, and accepted by no other receiver."""
    version = make_version(tmp_path / "published", 1, **{BIG: b"seamflow" * 400_000})
    for encodings, share in ((("zstd",), 0.01), ((), 1.0)):
        sender = Sender({1: version})
        folder = tmp_path / f"to{share}"
        async with receiver(sender, folder, weight_encodings=encodings) as to:
            await ShardStream(to.context).fetch(to.incoming(version))
        assert same_files(version, folder)
        size = version.manifest.files[0].num_bytes
        assert (sender.sent_bytes < size) == (share < 1)


async def test_a_shared_folder_is_linked_not_copied(version: LocalVersion, tmp_path: Path) -> None:
    """The cache holds the publisher's very files, also after the publisher deletes its names."""
    shared = tmp_path / "shared"
    shutil.copytree(version.folder, shared)
    sender = Sender(offers=shared)
    async with receiver(sender, tmp_path / "to") as to:
        await SharedFolder(to.context).fetch(to.incoming(version))
    assert (to.folder / BIG).stat().st_nlink == 2
    shutil.rmtree(shared)
    assert same_files(version, to.folder)
    assert sender.requests == []


async def test_a_shared_folder_is_checked(version: LocalVersion, tmp_path: Path) -> None:
    """A wrong byte and a wrong size are refused, a missing file is named."""
    copy = tmp_path / "shared"
    shutil.copytree(version.folder, copy)
    spoiled = bytearray((copy / BIG).read_bytes())
    spoiled[7] ^= 1
    (copy / BIG).write_bytes(spoiled)

    async def fetch() -> None:
        folder = tmp_path / "to"
        shutil.rmtree(folder, ignore_errors=True)
        async with receiver(Sender(offers=copy), folder) as to:
            await SharedFolder(to.context).fetch(to.incoming(version))

    with pytest.raises(DamagedFile, match="SHA-256"):
        await fetch()
    (copy / BIG).write_bytes(spoiled[:-1])
    with pytest.raises(DamagedFile, match="the manifest has"):
        await fetch()
    (copy / BIG).unlink()
    with pytest.raises(NotVisible, match="mount it here"):
        await fetch()


@pytest.mark.parametrize("other", ["folder", "content", "none offered"])
async def test_another_disk_with_the_same_path_is_not_used(
    version: LocalVersion, tmp_path: Path, other: str
) -> None:
    """Without the sender's probe in it, a folder with the same files is no shared one."""
    shared = tmp_path / "shared"
    shutil.copytree(version.folder, shared)
    probe = pb.FolderProbe(name=".probe", content=b"another disk")
    sender = Sender({1: version}, offers=shared, probe=probe)
    if other == "content":
        (shared / ".probe").write_bytes(b"this disk   ")
    elif other == "none offered":
        sender.offers = None
    async with receiver(sender, tmp_path / "to") as to:
        with pytest.raises(NotVisible):
            await SharedFolder(to.context).fetch(to.incoming(version))
        assert list(to.folder.iterdir()) == []
        await ShardStream(to.context).fetch(to.incoming(version))
    assert same_files(version, to.folder)
    assert (to.folder / BIG).stat().st_nlink == 1


async def test_a_check_that_outlives_its_deadline_names_nothing(
    version: LocalVersion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By then another transport may write to that name: it must never be the published file."""
    shared = tmp_path / "shared"
    shutil.copytree(version.folder, shared)
    checking, go_on = threading.Event(), threading.Event()

    def slow(*_: object) -> None:
        checking.set()
        go_on.wait(10)

    monkeypatch.setattr(SharedFolder, "_check", slow)
    async with receiver(Sender(offers=shared), tmp_path / "to") as to:
        fetching = asyncio.create_task(SharedFolder(to.context).fetch(to.incoming(version)))
        await asyncio.to_thread(checking.wait, 10)
        fetching.cancel()
        await asyncio.wait({fetching})
        go_on.set()
    await asyncio.get_running_loop().shutdown_default_executor()
    assert list(to.folder.iterdir()) == []


async def test_one_file_that_fails_ends_the_others_with_its_own_error(
    version: LocalVersion, tmp_path: Path
) -> None:
    """A full disk is reported as such, not as an exception group."""
    tmp_path.joinpath("to").mkdir()
    incoming = Incoming(version.manifest, tmp_path / "to")
    ended = []

    async def bring(file: WeightFile) -> None:
        if file.name == BIG:
            raise OSError(28, "No space left on device")
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(file.name)

    with pytest.raises(OSError, match="No space left"):
        await for_each_missing(incoming, 2, bring)
    assert ended == ["config.json"]


class PluginTransport:
    """A plug-in transport."""

    def __init__(self, context: TransportContext) -> None:
        self.context = context

    async def fetch(self, incoming: Incoming) -> None:
        """Brings nothing."""


async def test_transports_are_built_in_the_configured_order(tmp_path: Path) -> None:
    """Those that lack their setting take no part; plug-ins stand among the others."""
    plugin = f"{__name__}:PluginTransport"
    async with receiver(
        Sender(), tmp_path / "to", weight_transports=("shared_folder", plugin, "shard_stream")
    ) as to:
        assert list(build_transports(to.context)) == ["shared_folder", plugin, "shard_stream"]
    async with receiver(Sender(), tmp_path / "to") as to:
        assert list(build_transports(to.context)) == ["shared_folder", "shard_stream"]
    for wrong, cure in ((("shard_steam",), "did you mean shard_stream"), ((), "add shard_stream")):
        async with receiver(Sender(), tmp_path / "to", weight_transports=wrong) as to:
            with pytest.raises(ConfigError, match=cure):
                build_transports(to.context)
