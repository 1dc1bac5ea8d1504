"""The file system of the tier `kernel`, and the opening of folders that only root may enter.

Invariant: all of it happens in a mount namespace of its own; the host's mounts never change.
Called by `launch.py`. Left out: scratch space, which `keeper.py` mounts fresh for each program.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from shoal.sandbox import kernel

STAGE = "/tmp"  # noqa: S108 - covered by a tmpfs in a namespace of its own


def enterable(path: str) -> bool:
    """Whether everyone may pass through all folders above `path`."""
    return all(parent.stat().st_mode & 1 for parent in Path(path).parents)


def reveal(paths: Sequence[str]) -> None:
    """Put an empty folder over each one that only root may enter, and bind just `paths` back into it."""
    if not paths:
        return
    kernel.unshare(kernel.CLONE_NEWNS)
    kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    sources = [os.open(path, os.O_PATH) for path in paths]
    for folder in sorted({closed_folder(path) for path in paths}):
        kernel.mount("tmpfs", folder, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=0755,size=1m")
    for path, source in zip(paths, sources, strict=True):
        bind(f"/proc/self/fd/{source}", path, Path(f"/proc/self/fd/{source}").is_dir())
        os.close(source)


def closed_folder(path: str) -> str:
    """The topmost folder above `path` that only root may enter."""
    return str(next(folder for folder in reversed(Path(path).parents) if not folder.stat().st_mode & 1))


def minimal_root(binds: Sequence[str], links: Sequence[Sequence[str]], devices: Sequence[str]) -> None:
    """A read-only root of `binds` (read-only), `links` and `devices` with an empty /tmp; needs a fresh mount namespace."""
    sources = [os.open(path, os.O_PATH) for path in (*binds, *devices)]
    kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", STAGE, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=0755,size=1m")
    for path, source in zip((*binds, *devices), sources, strict=True):
        bind(f"/proc/self/fd/{source}", STAGE + path, Path(f"/proc/self/fd/{source}").is_dir())
        os.close(source)
        if path not in devices:
            only_read = kernel.MOUNT_ATTR_RDONLY | kernel.MOUNT_ATTR_NOSUID | kernel.MOUNT_ATTR_NODEV
            kernel.mount_attributes(STAGE + path, only_read, recursive=True)
    for path, target in links:
        Path(STAGE + path).parent.mkdir(parents=True, exist_ok=True)
        Path(STAGE + path).symlink_to(target)
    Path(STAGE + "/tmp").mkdir()
    kernel.make_root(STAGE)
    kernel.mount_attributes("/", kernel.MOUNT_ATTR_RDONLY, recursive=False)


def bind(source: str, target: str, folder: bool) -> None:
    if folder:
        Path(target).mkdir(parents=True, exist_ok=True)
    else:
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    kernel.mount(source, target, "", kernel.MS_BIND | kernel.MS_REC)
