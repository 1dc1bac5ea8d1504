"""A whole `shoal run` with PostgreSQL, a bucket and a chain passes its audit."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ...ledger.stakes_support import anvil_node
from ...servers import S3_KEY, S3_SECRET, postgres_server, s3_server
from ..support import sets

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
pytest.importorskip("psycopg", reason="psycopg is not installed: pip install 'shoal[postgres]'")
pytest.importorskip("obstore", reason="obstore is not installed: pip install 'shoal[s3]'")

TINY = Path(__file__).parents[3] / "configs" / "tiny.toml"
PATIENCE_S = 1200.0
STEPS = 2
SMALL = [f"run.steps={STEPS}", "coordinator.prompts_per_step=8", "evaluator.n=16", "tasks.heldout=16"]
SMALL += ["workers.groups_per_submission=4", "learner.checkpoint_every=1"]


@dataclass
class Place:
    """A run's folder, settings and environment, and how to start its commands."""

    out: Path
    settings: list[str]
    environment: dict[str, str] = field(default_factory=dict)

    def start(self, *words: str) -> "subprocess.Popen[str]":
        env, pipe = os.environ | self.environment, subprocess.PIPE
        command = [sys.executable, "-m", "shoal", *words]
        return subprocess.Popen(command, env=env, text=True, stdout=pipe, stderr=subprocess.STDOUT, cwd=self.out.parent)

    def output_of(self, *words: str) -> str:
        """Run a command to its end. Return its output."""
        process = self.start(*words)
        try:
            output, _ = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
        assert process.returncode == 0, output[-4000:]
        return output


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Place]:
    """Start PostgreSQL and a bucket, and yield a place for a run that uses them."""
    with postgres_server() as database, s3_server("rclone") as endpoint:
        settings = [*SMALL, f"coordinator.database={database}", "store.url=s3://pool/run", f"store.endpoint={endpoint}"]
        yield Place(tmp_path / "run", settings, {"AWS_ACCESS_KEY_ID": S3_KEY, "AWS_SECRET_ACCESS_KEY": S3_SECRET})


def test_a_run_on_postgresql_s3_and_a_chain_passes_its_audit(servers: Place) -> None:
    with anvil_node() as rpc:
        made = servers.output_of("pool", "stake", "deploy", "--rpc", rpc)
        contract = next(line for line in made.splitlines() if line.startswith("contract")).split('"')[1]
        servers.settings += [f"ledger.rpc={rpc}", f'ledger.contract="{contract}"']
        out = str(servers.out)
        servers.output_of("run", str(TINY), "--out", out, *sets(*servers.settings))
        report = servers.output_of("audit", out, "--rerun", "1", "--proofs", "1", "--seed", "1")
        assert f"chain: the contract {contract} holds all" in report and "tables: as sealed" in report
        assert "but match no entry" not in report
        assert "submissions of version" in report and "\nthe audit found no broken link\n" in report
        assert not list(servers.out.rglob("pool.sqlite")) and not list(servers.out.rglob("*.parquet"))

        servers.output_of("audit", out, "--export", f"{out}.jsonl")
        rows = [json.loads(line) for line in Path(f"{out}.jsonl").read_text().splitlines()]
        entries = [row | {"body": json.loads(row["body"])} for row in rows]
        credited = sum(entry["body"]["tokens"] for entry in entries if entry["kind"] == "credited")
        assert on_chain(rpc, contract, entries) == credited > 0
        assert servers.output_of("pool", "stake", "settle", out).strip().endswith("0 entries settled")


def on_chain(rpc: str, contract: str, entries: list[dict]) -> int:  # type: ignore[type-arg]
    """Return the credit of all workers in the contract."""
    from shoal.ledger.evm import open_contract

    stakes = open_contract(rpc, contract)
    keys = [entry["body"]["key"] for entry in entries if entry["kind"] == "registered"]
    return sum(account.credit for key in keys if (account := stakes.account(key)))
