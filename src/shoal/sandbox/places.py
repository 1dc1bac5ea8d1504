"""What of the host's files the sandbox shows: the interpreter, its library, the system's shared libraries, four devices.

Invariant: nothing of a person's, of Shoal's or of /etc (but the loader's cache) is in the list. Called by `process.py`.
Left out: installed packages outside of the interpreter's own folder. Programs get the standard library.
"""

import os
import shutil
import sys
import sysconfig
from functools import cache
from pathlib import Path

DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
SYSTEM = ("/usr/lib", "/usr/lib64", "/usr/lib32", "/lib", "/lib64", "/etc/ld.so.cache")


@cache
def executable() -> str:
    """The real interpreter behind a virtual environment's."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


@cache
def binds() -> list[str]:
    """Files and folders to show read-only, none inside another."""
    prefix = Path(os.path.realpath(sys.base_prefix))
    bases = dict.fromkeys(("base", "platbase", "installed_base", "installed_platbase"), str(prefix))  # not the venv's
    library = [sysconfig.get_path(name, vars=bases) for name in ("stdlib", "platstdlib")]
    wanted = [executable(), str(prefix / "lib"), *map(os.path.realpath, library), *SYSTEM]
    real = sorted({path for path in wanted if Path(path).exists() and not Path(path).is_symlink()})
    return [path for path in real if not any(path.startswith(other + "/") for other in real)]


@cache
def links() -> list[tuple[str, str]]:
    """Symbolic links that the system has among its library folders: (path, target)."""
    return [(path, str(Path(path).readlink())) for path in SYSTEM if Path(path).is_symlink()]


def bwrap() -> str | None:
    """The real program, or None."""
    beside = Path(sys.prefix) / "bin" / "bwrap"  # where pip puts it
    path = shutil.which("bwrap") or (str(beside) if beside.exists() else None)
    return path and os.path.realpath(path)
