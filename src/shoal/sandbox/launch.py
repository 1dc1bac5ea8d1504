"""From a bare interpreter to the fork server inside its walls: the first code of every new process, once per server.

Invariant: what follows in this process is no longer host root, whoever started it: a process of real uid 0 escapes
RLIMIT_NPROC and could read root's files. So root first becomes a uid that no account has. Then
`bubblewrap`  executes bwrap, which executes the interpreter again for `server.main`;
`kernel`      makes the same namespaces and the same root folder by itself (`mounts.py`) and becomes process 1;
`rlimits`     continues as it is.
Called by `pool.py`, in an interpreter with an empty environment that got its modules through a file descriptor.
Left out: seccomp, Landlock and limits. Each program gets its own, in `program.py`.
"""

import os
import sys
from pathlib import Path
from typing import Any

from shoal.sandbox import kernel, mounts, server

INSIDE_UID = 1000
NAMESPACES = (
    kernel.CLONE_NEWUSER
    | kernel.CLONE_NEWNS
    | kernel.CLONE_NEWPID
    | kernel.CLONE_NEWNET
    | kernel.CLONE_NEWIPC
    | kernel.CLONE_NEWUTS
    | kernel.CLONE_NEWCGROUP
)


def main(config: dict[str, Any]) -> None:
    os.umask(0o022)  # the caller's may close the folders made here to the user that this becomes
    os.chdir("/")
    if os.getuid() == 0:
        become_nobody(config)
    if config["tier"] == "bubblewrap":
        os.execve(config["bwrap"], bubblewrap(config), {})
    if config["tier"] == "kernel":
        enter_namespaces(config)
    server.main(config)


def become_nobody(config: dict[str, Any]) -> None:
    """From root to a plain user for ever. Folders that only root may enter are opened in a private mount namespace."""
    own = {"bubblewrap": [config["bwrap"]], "rlimits": [config["scratch"]]}.get(config["tier"], [])
    mounts.reveal([path for path in (*config["binds"], *own) if not mounts.enterable(path)])
    os.setgroups([])
    try:
        os.setresgid(*[config["host_uid"]] * 3)
        os.setresuid(*[config["host_uid"]] * 3)
    except OSError:  # in a container that maps few uids: 65534 is "nobody"
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
    kernel.call_prctl(kernel.PR_SET_DUMPABLE, 1)  # or /proc/self would still be root's
    for path in config["binds"]:
        if not os.access(path, os.R_OK | os.X_OK if Path(path).is_dir() else os.R_OK):
            sys.exit(f"only root may read {path}, and programs run as another user: chmod -R go+rX {path}")


def bubblewrap(config: dict[str, Any]) -> list[str]:
    """The command. The only capability left is what the server needs to give each program fresh namespaces."""
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
    """Return as process 1 of new namespaces with a minimal read-only root; this process waits for it outside."""
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
    mounts.minimal_root(config["binds"], config["links"], config["devices"])
