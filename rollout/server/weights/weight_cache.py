"""The disk cache of weights, filled by transports.

A version becomes the folder `weight_v000012` in one rename, after it was committed and each file
matched its manifest: an existing folder is complete. An arriving version is in
`weight_v000012.partial`, also with files that are announced before its commit, and is continued
after a restart of this server. Nothing is fsynced, because new weights would wait for the disk:
after a restart each folder counts as arriving, and its files are hashed again.
"""

from __future__ import annotations

import asyncio
import errno
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from google.protobuf import json_format
from seamflow.errors import NotFoundError, SeamflowError
from seamflow.retry import retrying
from seamflow.weights.v1 import weight_service_pb2 as pb

from rollout.server.engines.engine import WeightsError
from rollout.server.weights.merge_lora import MERGED_DIR, merge_lora
from rollout.server.weights.transport import (
    MANIFEST,
    Incoming,
    LocalVersion,
    NotVisible,
    PhaseTimeout,
    WeightTransport,
)
from services.chassis import metrics
from services.chassis.log import get_logger
from services.lib.weight_files.folder_names import folder_name, versions_in

if TYPE_CHECKING:
    from seamflow.weights.v1.weight_service_pb2_grpc import WeightServiceAsyncStub

_KEPT = 2
_PARTIAL = ".partial"
# Names come from the wire: no path separators, hidden files, or names of the cache itself.
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_RESERVED = re.compile(r"manifest\.json|.*\.part")

_FETCHES = metrics.counter(
    "rollout_server",
    "weight_fetches_total",
    "Versions that a transport fetched (ok), could not see (not_visible), or failed to fetch.",
    ("transport", "outcome"),
)
_AHEAD = metrics.counter(
    "rollout_server",
    "weight_ahead_bytes_total",
    "Bytes of weights that were fetched and verified before their version was committed.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedWeights:
    """One version on this machine's disk."""

    weight_version: int
    folder: Path
    """Its files; for an adapter, those of the merged model."""


class WeightCache:
    """Fetches versions of one model and keeps the last few.

    Args:
        transports: by name, in the order they are tried.
        folder: where versions are kept; used by this server only.
        fetch_seconds: deadline of one transport for one version.
        base: the model folder that adapters are merged into.
    """

    def __init__(
        self,
        stub: WeightServiceAsyncStub,
        transports: Mapping[str, WeightTransport],
        folder: Path,
        *,
        run_id: str,
        model: str,
        fetch_seconds: float,
        base: Path | None = None,
    ) -> None:
        self.run_id, self.model = run_id, model
        self._stub = stub
        self._transports = transports
        self._folder = folder
        self._fetch_seconds = fetch_seconds
        self._base = base
        self._fetching = asyncio.Lock()
        self._ahead: asyncio.Task[Incoming | None] | None = None
        self._incoming: dict[int, Incoming] = {}
        self._checked: set[int] = set()  # verified since this process started
        self._changed = asyncio.Event()

    async def fetch(self, weight_version: int | None = None) -> FetchedWeights | None:
        """Return a committed version, by default the newest; None if none is committed yet.

        Retries an unavailable weights service without a limit. Raises `WeightsError` for files that
        no transport could fetch, `SeamflowError` for other errors of the service.
        """
        request = pb.GetManifestRequest(
            run_id=self.run_id, model=self.model, weight_version=weight_version
        )
        response = await retrying(lambda: self._stub.GetManifest(request), on_retry=_report)
        if not response.HasField("manifest"):
            return None
        manifest = response.manifest
        folder = self._path(manifest.weight_version)
        if self._ahead is not None:
            self._ahead.cancel()  # what it has verified stays
        async with self._fetching:
            held = self._held(manifest.weight_version)
            if held is None or not _same(held.manifest, manifest):
                await self._fetch(manifest, folder)
            if self._base is not None:
                folder = await asyncio.to_thread(merge_lora, folder, self._base)
        return FetchedWeights(weight_version=manifest.weight_version, folder=folder)

    async def fetch_ahead(self, announced: pb.Manifest) -> Incoming | None:
        """Fetch files of a version that is not committed yet, giving way to `fetch`.

        They are on the disk alone, as an arriving version. Returns it; None: the version, or a
        newer one, is here already. Another that was fetched ahead is dropped. Raises as `fetch`.
        """
        while True:
            self._ahead = asyncio.ensure_future(self._fetch_announced(announced))
            try:
                await asyncio.wait({self._ahead})
            finally:
                self._ahead.cancel()
            if not self._ahead.cancelled():
                return self._ahead.result()

    def local(self, weight_version: int) -> LocalVersion | Incoming | None:
        """The version if it is cached or arriving."""
        whole = LocalVersion.read(self._path(weight_version))
        return whole or self._incoming.get(weight_version)

    async def arrival(self, weight_version: int) -> LocalVersion | Incoming:
        """Wait until the version is cached or arriving."""
        while (found := self.local(weight_version)) is None:
            await self._changed.wait()
        return found

    def prune(self, loaded: int) -> None:
        """Delete all but the newest two versions and `loaded`, which a restore needs."""
        old = [self._path(each) for each in versions_in(self._folder)[:-_KEPT] if each != loaded]
        # Superseded while they were arriving.
        late = [each for each in versions_in(self._folder, _PARTIAL) if each < loaded]
        for version in late:
            self._incoming.pop(version, None)
        for folder in old + [self._path(each).with_suffix(_PARTIAL) for each in late]:
            try:
                _remove(folder)
            except OSError as error:
                get_logger().warning("old_weights_not_removed", error=str(error))

    async def _fetch(self, manifest: pb.Manifest, folder: Path) -> None:
        version = manifest.weight_version
        partial = folder.with_suffix(_PARTIAL)
        try:
            with _disk_errors(folder):
                incoming = self._begin(manifest, folder, partial)
                await self._transport(incoming)
                _remove(folder)
                partial.rename(folder)
            self._checked.add(version)
        finally:
            self._incoming.pop(version, None)

    async def _fetch_announced(self, announced: pb.Manifest) -> Incoming | None:
        version = announced.weight_version
        folder = self._path(version)
        async with self._fetching:
            if version <= max(self._checked, default=0):
                return None
            with _disk_errors(folder):
                self._drop_others(version)
                manifest = _with_complete(announced, self._incoming.get(version))
                incoming = self._begin(manifest, folder, folder.with_suffix(_PARTIAL))
                before = incoming.verified_bytes
                try:
                    await self._transport(incoming)
                finally:
                    _AHEAD.inc(max(0, incoming.verified_bytes - before))
        return incoming

    def _drop_others(self, version: int) -> None:
        """Delete what was fetched ahead of other versions, which were never committed."""
        for other in [each for each in self._incoming if each != version]:
            del self._incoming[other]
            _remove(self._path(other).with_suffix(_PARTIAL))

    def _begin(self, manifest: pb.Manifest, folder: Path, partial: Path) -> Incoming:
        """The version as it is arriving, with the files of `manifest`."""
        version = manifest.weight_version
        for file in manifest.files:
            if not _FILE_NAME.fullmatch(file.name) or _RESERVED.fullmatch(file.name):
                raise WeightsError(f"version {version}: bad file name {file.name!r}")
        incoming = self._incoming.get(version)
        if incoming is None:
            begun = self._begun(version, folder, partial)
            incoming = Incoming(begun, partial)
        incoming.expect(manifest)
        (partial / MANIFEST).write_text(json_format.MessageToJson(manifest))
        self._announce(version, incoming)
        return incoming

    def _begun(self, version: int, folder: Path, partial: Path) -> pb.Manifest:
        """What an earlier life of this server left of a version, in the folder `partial`."""
        if version not in self._checked and folder.exists() and not partial.exists():
            _remove(folder / MERGED_DIR)
            folder.rename(partial)
        begun = LocalVersion.read(partial)
        if begun is not None:
            return begun.manifest
        _remove(partial)
        partial.mkdir(parents=True)
        return pb.Manifest()

    def _held(self, version: int) -> LocalVersion | None:
        return LocalVersion.read(self._path(version)) if version in self._checked else None

    async def _transport(self, incoming: Incoming) -> None:
        """Try the transports in order; each continues from what is verified."""
        if not incoming.missing:
            return
        failure: Exception | None = None
        for name, transport in self._transports.items():
            try:
                async with asyncio.timeout(self._fetch_seconds) as deadline:
                    await transport.fetch(incoming)
                _FETCHES.labels(name, "ok").inc()
                return
            except TimeoutError as error:
                failure = error
                if deadline.expired():
                    failure = _too_slow(name, self._fetch_seconds, incoming)
                    failure.__cause__ = error
            except NotVisible as error:
                failure = error  # usual where no disk is shared
                _FETCHES.labels(name, "not_visible").inc()
                get_logger().debug("weights_not_visible", error=str(error))
                continue
            except NotFoundError:
                raise  # the version itself is gone: no other transport would find it
            except (WeightsError, SeamflowError, OSError) as error:
                failure = error
            _FETCHES.labels(name, "failed").inc()
            get_logger().warning(
                "weight_transport_failed",
                transport=name,
                weight_version=incoming.manifest.weight_version,
                error=str(failure),
            )
        assert failure is not None, "there is at least one transport"
        raise failure

    def _announce(self, version: int, incoming: Incoming) -> None:
        self._incoming[version] = incoming
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _path(self, weight_version: int) -> Path:
        return self._folder / folder_name(weight_version)


def _too_slow(transport: str, seconds: float, incoming: Incoming) -> PhaseTimeout:
    missing = ", ".join(file.name for file in incoming.missing)
    version = incoming.manifest.weight_version
    what = f"version {version} is incomplete after {seconds:g} s: {missing}"
    cure = "raise weight_fetch_seconds, or check the sender's load"
    return PhaseTimeout(what, transport=transport, cure=cure)


def _with_complete(announced: pb.Manifest, incoming: Incoming | None) -> pb.Manifest:
    """`announced`, and what is complete of earlier files: a service that restarted forgets them."""
    if incoming is None:
        return announced
    unknown = {file.name for file in [*announced.files, *incoming.missing]}
    complete = [file for file in incoming.manifest.files if file.name not in unknown]
    manifest = pb.Manifest.FromString(announced.SerializeToString())
    manifest.files.extend(complete)
    return manifest


@contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        cure = "; free its disk" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise WeightsError(f"{folder}: {error.strerror or error}{cure}") from error


def _report(error: SeamflowError) -> None:
    get_logger().warning("weights_service_unavailable", error=str(error))


def _same(one: pb.Manifest, other: pb.Manifest) -> bool:
    """Whether both have the same bytes; a version of an earlier run may differ."""
    return _digests(one) == _digests(other)


def _digests(manifest: pb.Manifest) -> set[tuple[str, str]]:
    return {(file.name, file.sha256) for file in manifest.files}


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
