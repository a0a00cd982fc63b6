"""The volumes of pods, as folders that kubelet would have made."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.lib.deploy.chart import Object

_CONFIG_MODE = 0o644
_SHARED_FOLDER, _SHARED_FILE = 0o2770, 0o660
"""Added in a volume with an fsGroup: its group writes, and what is made there belongs to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Volumes:
    """Folders for ConfigMaps, Secrets, claims and empty directories of one namespace."""

    folder: Path
    """Where they are made."""
    config_maps: Mapping[str, Mapping[str, str]]
    """Texts by file name, of each ConfigMap."""
    secrets: Mapping[str, Mapping[str, bytes]]
    """Contents by key, of each Secret."""

    def claim(self, name: str) -> Path:
        """The volume of a PersistentVolumeClaim."""
        return self.folder / "claims" / name

    def arguments(self, template: Object, pod_name: str, claims: list[Object]) -> Iterator[str]:
        """Arguments of `docker run` that mount what the container mounts."""
        spec = template["spec"]
        group = spec["securityContext"]["fsGroup"]
        volumes = {each["name"]: each for each in spec["volumes"]}
        for claim in claims:
            name = claim["metadata"]["name"]
            claimed = {"claimName": f"{name}-{pod_name}"}
            volumes[name] = {"name": name, "persistentVolumeClaim": claimed}
        (container,) = spec["containers"]
        for mount in container["volumeMounts"]:
            yield "--mount"
            yield self._mount(volumes[mount["name"]], mount, pod_name, group)

    def _mount(self, volume: Object, mount: Object, pod_name: str, group: int) -> str:
        target, read_only = mount["mountPath"], mount.get("readOnly", False)
        if volume.get("emptyDir", {}).get("medium") == "Memory":
            return f"type=tmpfs,destination={target},tmpfs-mode=1777"
        source = self._folder(volume, self.folder / "pods" / pod_name, group)
        return f"type=bind,source={source},target={target}" + (",readonly" if read_only else "")

    def _folder(self, volume: Object, pod: Path, group: int) -> Path:
        own = pod / str(volume["name"])
        if "configMap" in volume:
            config = self.config_maps[volume["configMap"]["name"]]
            _project(
                own, {name: text.encode() for name, text in config.items()}, _CONFIG_MODE, group
            )
            return own
        if "projected" in volume:
            files = dict(self._projected(volume["projected"]["sources"]))
            _project(own, files, volume["projected"]["defaultMode"], group)
            return own
        if "persistentVolumeClaim" in volume:
            own = self.claim(volume["persistentVolumeClaim"]["claimName"])
        elif "emptyDir" not in volume:
            raise ValueError(f"volume {volume['name']}: {set(volume) - {'name'}} is not known here")
        share(own, group)
        return own

    def _projected(self, sources: list[Any]) -> Iterator[tuple[str, bytes]]:
        for source in sources:
            secret = self.secrets[source["secret"]["name"]]
            for item in source["secret"]["items"]:
                yield item["path"], secret[item["key"]]


def share(folder: Path, group: int) -> None:
    """Make a folder, and give all that is in it to the group, as kubelet does with an fsGroup."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in (folder, *folder.rglob("*")):
        os.chown(path, -1, group)
        path.chmod(path.stat().st_mode | (_SHARED_FOLDER if path.is_dir() else _SHARED_FILE))


def _project(folder: Path, files: Mapping[str, bytes], mode: int, group: int) -> None:
    """Links to links to the files, which kubelet exchanges all at once when they change."""
    version = folder / "..1"
    for name, content in files.items():
        file = version / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        file.chmod(mode)
        os.chown(file, -1, group)
    (folder / "..data").symlink_to(version.name)
    for name in {Path(name).parts[0] for name in files}:
        (folder / name).symlink_to(Path("..data") / name)
