"""Confine a new interpreter, then start the fork server in it. Runs once per server, at the start of its process.

In the tier `bubblewrap`, `main` executes bwrap, which executes the interpreter again for `server.main`. In `kernel`, it
creates the same namespaces and root folder itself and becomes process 1. In `plain`, it confines nothing and keeps its
user. The interpreter gets its modules through a file descriptor. Its environment is empty, except in `plain`.
Invariants: in confined tiers the server never runs as the host's root, which would escape RLIMIT_NPROC and could read
root's files. A process of root first changes to a uid that no account has, or else to `nobody`. All mounts happen in a
private mount namespace, so the host's mounts never change.
Left out: seccomp, Landlock and limits (`program.py`, once per program); scratch space (`server.py`).
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal.sandbox import kernel, server

INSIDE_UID = 1000
STAGE = "/tmp"  # noqa: S108 - covered by a tmpfs in a private namespace
NAMESPACES = kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWNET
NAMESPACES |= kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS | kernel.CLONE_NEWCGROUP


def main(config: dict[str, Any]) -> None:
    if config["plain"]:
        server.main(config)
    os.umask(0o022)  # with the caller's umask, the new user might not be able to enter folders created here
    os.chdir("/")
    if os.getuid() == 0:
        drop_root(config)
    if config["tier"] == "bubblewrap":
        os.execve(config["bwrap"], bubblewrap(config), {})
    enter_namespaces(config)
    server.main(config)


def drop_root(config: dict[str, Any]) -> None:
    """Become an ordinary user for good. Before that, expose the needed files in folders that only root may enter."""
    own = [config["bwrap"]] if config["tier"] == "bubblewrap" else []
    expose([path for path in (*config["binds"], *own) if not reachable(path)])
    os.setgroups([])
    try:
        os.setresgid(*[config["host_uid"]] * 3)
        os.setresuid(*[config["host_uid"]] * 3)
    except OSError:  # a container may map few uids; 65534 is "nobody"
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
    kernel.call_prctl(kernel.PR_SET_DUMPABLE, 1)  # otherwise /proc/self still belongs to root
    for path in config["binds"]:
        if not os.access(path, os.R_OK | os.X_OK if Path(path).is_dir() else os.R_OK):
            sys.exit(f"only root may read {path}, and programs run as another user: chmod -R go+rX {path}")


def bubblewrap(config: dict[str, Any]) -> list[str]:
    """Return bwrap's command. The server keeps one capability, to create each program's namespaces."""
    command = [config["bwrap"], "--unshare-all", "--unshare-user", "--disable-userns", "--new-session", "--as-pid-1"]
    command += ["--uid", str(INSIDE_UID), "--gid", str(INSIDE_UID), "--hostname", "sandbox"]
    command += ["--clearenv", "--setenv", "PYTHONHASHSEED", "0", "--cap-drop", "ALL", "--cap-add", "CAP_SYS_ADMIN"]
    for path in config["binds"]:
        command += ["--ro-bind", path, path]
    for path, target in config["links"]:
        command += ["--symlink", target, path]
    for path in config["devices"]:
        command += ["--dev-bind", path, path]
    command += ["--dir", "/tmp", "--chdir", "/", "--remount-ro", "/"]  # noqa: S108 - inside
    inside = [sys.executable, "-s", "-S", "-P", "-c", config["boot"], str(config["blob"]), "shoal.sandbox.server"]
    return [*command, "--", *inside]


def enter_namespaces(config: dict[str, Any]) -> None:
    """Become process 1 of new namespaces with a minimal read-only root; the original process waits outside."""
    uid, gid = os.getuid(), os.getgid()
    kernel.unshare(NAMESPACES)
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{INSIDE_UID} {uid} 1"),
        ("gid_map", f"{INSIDE_UID} {gid} 1"),
    ):
        Path(f"/proc/self/{name}").write_text(text)
    child = os.fork()
    if child:
        os.closerange(3, 1 << 16)
        os.waitpid(child, 0)
        os._exit(0)
    os.setsid()
    minimal_root(config["binds"], config["links"], config["devices"])


def reachable(path: str) -> bool:
    """Return whether every user may enter all folders above `path`."""
    return all(parent.stat().st_mode & 1 for parent in Path(path).parents)


def expose(paths: Sequence[str]) -> None:
    """Mount an empty folder over each folder that only root may enter, and bind only `paths` back into it.

    This happens in a private mount namespace.
    """
    if not paths:
        return
    kernel.unshare(kernel.CLONE_NEWNS)
    kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    sources = [os.open(path, os.O_PATH) for path in paths]
    for folder in sorted({topmost_private_folder(path) for path in paths}):
        kernel.mount("tmpfs", folder, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=0755,size=1m")
    for path, source in zip(paths, sources, strict=True):
        bind(f"/proc/self/fd/{source}", path, Path(f"/proc/self/fd/{source}").is_dir())
        os.close(source)


def topmost_private_folder(path: str) -> str:
    """Return the topmost folder above `path` that only root may enter."""
    return str(next(folder for folder in reversed(Path(path).parents) if not folder.stat().st_mode & 1))


def minimal_root(binds: Sequence[str], links: Sequence[Sequence[str]], devices: Sequence[str]) -> None:
    """Enter a read-only root with `binds`, `links`, `devices` and an empty /tmp. This needs a new mount namespace."""
    sources = [os.open(path, os.O_PATH) for path in (*binds, *devices)]
    kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", STAGE, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=0755,size=1m")
    for path, source in zip((*binds, *devices), sources, strict=True):
        bind(f"/proc/self/fd/{source}", STAGE + path, Path(f"/proc/self/fd/{source}").is_dir())
        os.close(source)
        if path not in devices:
            read_only = kernel.MOUNT_ATTR_RDONLY | kernel.MOUNT_ATTR_NOSUID | kernel.MOUNT_ATTR_NODEV
            kernel.mount_attributes(STAGE + path, read_only, recursive=True)
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
