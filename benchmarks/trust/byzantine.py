"""Start `shoal run` with workers that lie. Each joins the run with an invite, as a stranger's worker joins a pool.

    python -m benchmarks.trust.byzantine configs/tiny.toml --out runs/byzantine
    python -m benchmarks.trust.byzantine configs/tiny.toml --out DIR --lies quantized_weights wrong_temperature

`adversary/cheats.py` lists the lies. Other arguments are passed on to `shoal run`. A single liar is named `cheater`, several
are `cheater-0`, `cheater-1` and so on. Their folders and logs are beside those of the run's own processes.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.common.machine import ROOT
from shoal.coordinator.folder import create_invite

START_S = 600.0  # time limit for the run to become joinable, generous for a very busy machine
STOP_S = 10.0
POLL_S = 0.1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--out", type=Path, required=True, help="folder of the run")
    parser.add_argument("--lies", nargs="+", default=["older_weights"], help="start a worker for each of these lies")
    parser.add_argument("--engine", default="torch", help="the liars' engine")
    arguments, more = parser.parse_known_args()
    pair = ["--set", "validator.count=2"]  # one validator alone slashes nobody
    argv = [sys.executable, "-m", "shoal", "run", arguments.config, *pair, "--out", str(arguments.out), *more]
    with subprocess.Popen(argv) as run, liars(run, arguments.out, arguments.lies, arguments.engine):
        try:
            return run.wait()
        except KeyboardInterrupt:  # the terminal also sent the signal to the run
            return run.wait()


@contextmanager
def liars(run: subprocess.Popen, out: Path, kinds: Sequence[str], engine: str = "torch") -> Iterator[None]:
    """Start lying workers that join this `shoal run --out out`, and stop them at the end of the context.

    Start none if `run` ends before it can be joined. Raise TimeoutError if it cannot be joined in time.
    """
    coordinator = out / "coordinator"
    deadline_s = time.monotonic() + START_S
    while kinds and run.poll() is None and not (coordinator / "coordinator.json").exists():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"the run in {out} cannot be joined after {START_S:.0f} s; see {out / 'logs'}")
        time.sleep(POLL_S)
    started = []
    try:
        for number, kind in enumerate(kinds if run.poll() is None else []):
            name = f"cheater-{number}" if len(kinds) > 1 else "cheater"
            folder = (out / name).resolve()
            folder.mkdir(mode=0o700, exist_ok=True)
            create_invite(coordinator, "worker", name, None, days=1).save(folder / "invite")
            argv = [sys.executable, "-m", "benchmarks.trust.liar", kind, "--engine", engine]
            argv += ["--join", str(folder / "invite"), "--dir", str(folder)]
            with (out / "logs" / f"{name}.log").open("ab") as log:
                started.append(subprocess.Popen(argv, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT))
        yield
    finally:
        for liar in started:
            liar.terminate()
        for liar in started:
            try:
                liar.wait(STOP_S)
            except subprocess.TimeoutExpired:
                liar.kill()
                liar.wait()


if __name__ == "__main__":
    sys.exit(main())
