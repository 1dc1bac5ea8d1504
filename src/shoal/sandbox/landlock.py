"""Landlock: which files a program may read and write, checked by the kernel below all mounts.

Invariant: nothing outside the named folders can be opened; no TCP, no signals and no abstract sockets to anything outside
of the program, as far as the kernel's Landlock goes (its ABI number). Called by `program.py`, once for every program.
Left out: UDP and ABI 7's logging switches; there is no network to reach.
"""

import ctypes
import os
import stat
from collections.abc import Iterable

from shoal.sandbox.kernel import syscall

CREATE, ADD, RESTRICT = 444, 445, 446
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, TRUNCATE, IOCTL_DEV = 1, 2, 4, 8, 1 << 14, 1 << 15
OF_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV  # the rights that make sense on a plain file
DEVICES = 1 << 6 | 1 << 11  # MAKE_CHAR, MAKE_BLOCK
VERSION = 1


class Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class PathRule(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("folder", ctypes.c_int32))


def abi() -> int:
    """Landlock's version in this kernel. OSError where it has none."""
    return syscall("landlock_create_ruleset", CREATE, None, 0, VERSION)


def restrict(readable: Iterable[str], devices: Iterable[str], writable: str) -> None:
    """Bind this thread and all it will start. Needs `no_new_privs`. Raises OSError."""
    version = abi()
    handled = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    size = 8 if version < 4 else 16 if version < 6 else 24
    wanted = Ruleset(handled, 3, 3)  # TCP bind and connect; abstract sockets and signals
    rules = syscall("landlock_create_ruleset", CREATE, ctypes.byref(wanted), size, 0)
    try:
        for path in readable:
            allow(rules, path, READ_FILE | READ_DIR | EXECUTE)
        for path in devices:
            allow(rules, path, READ_FILE | WRITE_FILE)
        allow(rules, writable, handled & ~DEVICES & ~EXECUTE)
        syscall("landlock_restrict_self", RESTRICT, rules, 0)
    finally:
        os.close(rules)


def allow(rules: int, path: str, rights: int) -> None:
    folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not stat.S_ISDIR(os.fstat(folder).st_mode):
            rights &= OF_FILES
        syscall(f"landlock_add_rule {path}", ADD, rules, 1, ctypes.byref(PathRule(rights, folder)), 0)
    finally:
        os.close(folder)
