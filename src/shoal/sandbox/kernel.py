"""Linux system calls that Python 3.11 lacks: mount, unshare, capset, prctl, clone with namespaces, and Landlock.

Invariant: every failure raises an OSError that names the call. Landlock (`restrict_files`) denies opening files outside
the named folders. If the kernel's version supports it, Landlock also denies TCP, signals to other processes, and
connections to abstract sockets of other processes.
Left out: policy, which callers decide; UDP and Landlock's logging switches.
"""

import ctypes
import os
import platform
import stat
from collections.abc import Iterable

libc = ctypes.CDLL(None, use_errno=True)
_holding_gil = ctypes.PyDLL(None, use_errno=True)  # a cloned child must not wait for a lock that another thread holds

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
MNT_DETACH = 2
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV = 1, 2, 4
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38
CAP_SYS_ADMIN = 21
CAPABILITY_VERSION_3 = 0x20080522
SIGCHLD = 17

# System calls without a libc function; numbers from 424 on are the same on all architectures.
SYS_CLONE = {"x86_64": 56, "aarch64": 220}
SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
SYS_MOUNT_SETATTR = 442
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT, LANDLOCK_VERSION = 444, 445, 446, 1
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, TRUNCATE, IOCTL_DEV = 1, 2, 4, 8, 1 << 14, 1 << 15
OF_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV  # rights that apply to a regular file
MAKE_DEVICES = 1 << 6 | 1 << 11  # MAKE_CHAR, MAKE_BLOCK


def checked(result: int, name: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def syscall(name: str, number: int, *arguments: object) -> int:
    wide = [ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in arguments]
    return checked(libc.syscall(ctypes.c_long(number), *wide), name)


def call_prctl(option: int, *arguments: int) -> None:
    padded = [ctypes.c_ulong(argument) for argument in (*arguments, 0, 0, 0, 0)[:4]]
    checked(libc.prctl(option, *padded), f"prctl {option}")


def unshare(flags: int) -> None:
    checked(libc.unshare(flags), f"unshare {flags:#x}")


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    encoded = [text.encode() or None for text in (source, target, kind, options)]
    result = libc.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3])
    checked(result, f"mount {source} on {target}")


def mount_attributes(target: str, attributes: int, recursive: bool) -> None:
    """Add MOUNT_ATTR_* flags to a mount (Linux 5.12 or newer)."""
    structure = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)
    flags = AT_RECURSIVE if recursive else 0
    syscall(f"mount_setattr {target}", SYS_MOUNT_SETATTR, AT_FDCWD, target.encode(), flags, structure, 32)


def make_root(folder: str) -> None:
    """Make `folder` the root and detach the old root. `folder` must be a mount point."""
    os.chdir(folder)
    syscall("pivot_root", SYS_PIVOT_ROOT[platform.machine()], b".", b".")
    checked(libc.umount2(b".", MNT_DETACH), "umount the old root")
    os.chdir("/")


def keep_capabilities(capabilities: int) -> None:
    """Make exactly these capabilities (a bit set) permitted and effective, and none inheritable or ambient."""
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    low, high = capabilities & 0xFFFFFFFF, capabilities >> 32
    checked(libc.capset(header, (ctypes.c_uint32 * 6)(low, low, 0, high, high, 0)), "capset")


def fork_into(namespaces: int) -> int:
    """Fork, with the child as process 1 of new namespaces. The child must not use threads; it may fork again."""
    number = SYS_CLONE[platform.machine()]
    zeros = [ctypes.c_long(0)] * 4
    return checked(_holding_gil.syscall(ctypes.c_long(number), ctypes.c_long(namespaces | SIGCHLD), *zeros), "clone")


class Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class PathRule(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("folder", ctypes.c_int32))


def restrict_files(readable: Iterable[str], devices: Iterable[str], writable: str) -> None:
    """Confine this thread and everything that it starts. Needs `no_new_privs`. Raise OSError."""
    version = syscall("landlock_create_ruleset", LANDLOCK_CREATE, None, 0, LANDLOCK_VERSION)
    handled = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    size = 8 if version < 4 else 16 if version < 6 else 24
    ruleset = Ruleset(handled, 3, 3)  # TCP bind and connect; abstract sockets and signals
    rules = syscall("landlock_create_ruleset", LANDLOCK_CREATE, ctypes.byref(ruleset), size, 0)
    try:
        for path in readable:
            allow(rules, path, READ_FILE | READ_DIR | EXECUTE)
        for path in devices:
            allow(rules, path, READ_FILE | WRITE_FILE)
        allow(rules, writable, handled & ~MAKE_DEVICES & ~EXECUTE)
        syscall("landlock_restrict_self", LANDLOCK_RESTRICT, rules, 0)
    finally:
        os.close(rules)


def allow(rules: int, path: str, rights: int) -> None:
    folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not stat.S_ISDIR(os.fstat(folder).st_mode):
            rights &= OF_FILES
        syscall(f"landlock_add_rule {path}", LANDLOCK_ADD, rules, 1, ctypes.byref(PathRule(rights, folder)), 0)
    finally:
        os.close(folder)
