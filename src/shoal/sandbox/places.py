"""What of the host's files the sandbox shows: the interpreter, its library, the system's shared libraries, four devices.

Invariant: nothing of a person's, of Shoal's or of /etc (but the loader's cache) is in the list. Called by `process.py`.
Left out: installed packages outside of the interpreter's own folder, but for those that a caller names. Programs get the
standard library.
"""

import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from shoal.sandbox.limits import SandboxError

DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
SCRATCH = "/tmp"  # noqa: S108 - each program's own
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
    return outermost([executable(), str(prefix / "lib"), *map(os.path.realpath, library), *SYSTEM])


def outermost(wanted: Sequence[str]) -> list[str]:
    """Those that are there, without those inside another."""
    real = sorted({path for path in wanted if Path(path).exists() and not Path(path).is_symlink()})
    return [path for path in real if not any(path.startswith(other + "/") for other in real)]


def installed(packages: Sequence[str]) -> list[Path]:
    """The folders of packages that this interpreter imports. Raises SandboxError if one is not installed."""
    found = []
    for name in packages:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise SandboxError(
                f"programs in the sandbox are to import {name}, which is not installed: pip install {name}"
            )
        folder = Path(os.path.realpath(spec.origin)).parent
        if folder.is_relative_to(SCRATCH):
            raise SandboxError(
                f"programs in the sandbox are to import {name}, but it is installed below {SCRATCH}, where each program "
                "has an empty folder of its own: install Shoal elsewhere"
            )
        found += [folder, folder.with_name(f"{name}.libs")]  # shared libraries of a wheel lie beside it
    return found


@cache
def links() -> list[tuple[str, str]]:
    """Symbolic links that the system has among its library folders: (path, target)."""
    return [(path, str(Path(path).readlink())) for path in SYSTEM if Path(path).is_symlink()]


def bwrap() -> str | None:
    """The real program, or None."""
    beside = Path(sys.prefix) / "bin" / "bwrap"  # where pip puts it
    path = shutil.which("bwrap") or (str(beside) if beside.exists() else None)
    return path and os.path.realpath(path)
