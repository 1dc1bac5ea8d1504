"""The three ways to build a sandbox, strongest first, and which of them works here.

Invariant: nobody gets a weaker tier than the two strong ones without asking for it by name. "Works" is tried, not guessed: a
program must run, and must be refused a socket where the tier promises that. Called by `pool.py` and by people who ask.
Left out: other systems than Linux.
"""

import sys
from functools import cache
from typing import Literal, get_args

from shoal.sandbox import places
from shoal.sandbox.conversation import Conversation
from shoal.sandbox.limits import Limits, Program, SandboxError
from shoal.sandbox.process import ServerProcess

Tier = Literal["bubblewrap", "kernel", "rlimits"]
TIERS: tuple[Tier, ...] = get_args(Tier)
STRONG: tuple[Tier, ...] = ("bubblewrap", "kernel")
REMEDY = {
    "bubblewrap": "install bubblewrap 0.8 or newer (`make sandbox`) and allow user namespaces; "
    "Ubuntu forbids them to most programs: sysctl kernel.apparmor_restrict_unprivileged_userns=0",
    "kernel": "it needs Linux 5.14 or newer on x86_64 or aarch64, with Landlock, seccomp and user namespaces allowed",
    "rlimits": "it needs Linux 5.4 or newer",
}
PROBE = """
import socket
try:
    socket.socket()
    print("a socket")
except PermissionError:
    print("no socket")
"""


@cache
def problem(tier: Tier) -> str:
    """Why a tier does not work here, with the remedy; empty if it works. Tried once in a process."""
    if not sys.platform.startswith("linux"):
        return f"the sandbox needs Linux, and this is {sys.platform}"
    if tier == "bubblewrap" and places.bwrap() is None:
        return f"sandbox tier bubblewrap: no program bwrap found; {REMEDY[tier]}"
    try:
        server = ServerProcess(tier)
        try:
            result = Conversation(server, Program(PROBE), Limits(wall_s=20.0), frames=False, done=lambda: None).close()
        finally:
            server.kill()
    except (SandboxError, OSError) as error:
        return f"{error}; {REMEDY[tier]}"
    expected = b"no socket\n" if tier in STRONG else b"a socket\n"
    if result.stdout != expected:
        return f"sandbox tier {tier} ran a program with a wrong result: {result}"
    return ""


def best_tier() -> Tier:
    """The strongest tier that works here. SandboxError if that would be `rlimits`."""
    for tier in STRONG:
        if not problem(tier):
            return tier
    reasons = "\n".join(problem(tier) for tier in STRONG)
    raise SandboxError(
        f"no strong sandbox works here:\n{reasons}\n"
        'To run model-written code without one, which protects only memory and time, ask for tier "rlimits" by name.'
    )


def check(tier: str) -> Tier:
    """The tier by its name, if it works here."""
    if tier not in TIERS:
        raise SandboxError(f"unknown sandbox tier {tier!r}: one of {', '.join(TIERS)}")
    if reason := problem(tier):
        raise SandboxError(reason)
    return tier
