"""The coordinator settles its ledger in a contract, on an EVM in this process; the chain becomes unreachable and returns."""

import asyncio
from collections.abc import Iterable
from pathlib import Path

import pytest

from shoal.config.sections import LedgerSection
from shoal.coordinator import credit
from shoal.coordinator.credit import ChainStakes, Settlement
from shoal.coordinator.database import PoolError
from shoal.ledger import evm
from shoal.ledger.chain import Entry, LedgerError
from shoal.ledger.evm import ChainLostError, deploy, read_key
from shoal.protocol.messages import LARGEST

from ..ledger.stakes_support import ACCOUNT, InContract, RevmChain
from .support import ALICE, BOB, Harness, open_pool, strangers

ADDRESS = "203.0.113.7"


class Away(RevmChain):
    """A chain that can be unreachable."""

    away = False

    def _answers(self) -> None:
        if self.away:
            raise ChainLostError("the chain does not answer")

    def transact(self, to: str, data: bytes, value: int = 0) -> None:
        self._answers()
        super().transact(to, data, value)

    def call(self, to: str, data: bytes) -> bytes:
        self._answers()
        return super().call(to, data)


class Scene:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(credit, "POLL_S", 0.01)
        monkeypatch.setattr(credit, "MAX_PAUSE_S", 0.01)
        monkeypatch.setattr(credit, "FINISH_S", 0.2)
        self.chain = Away()
        self.address = deploy(self.chain)
        self.contract = InContract(self.chain, self.address)
        monkeypatch.setattr(evm, "Web3Chain", lambda url, private_key="": self.connected())
        self.harness: Harness = open_pool(requirements={"stake": 100})
        section = LedgerSection(rpc="http://chain", contract=self.address)
        self.config = self.harness.pool.config.model_copy(update={"ledger": section})
        self.stakes = ChainStakes()
        self.harness.pool.members.stakes = self.stakes
        self.notices: list[str] = []

    def connected(self) -> Away:
        self.chain._answers()
        return self.chain

    def settlement(self) -> Settlement:
        return Settlement(self.config, self.harness.pool.db, self.stakes, self.notices.append)

    def credit(self, worker: str, work: str, tokens: int) -> None:
        body = {"worker": worker, "submissions": [work], "tokens": tokens}
        self.harness.pool.db.ledger.append("credited", body)

    def credited(self, key: str) -> int:
        account = self.contract.account(key)
        return account.credit if account else -1


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    pytest.importorskip("pyrevm", reason="pyrevm is not installed: make evm")
    pytest.importorskip("eth_abi", reason="web3.py is not installed: make evm")
    return Scene(monkeypatch)


async def until(is_so, *, of: Settlement) -> None:  # type: ignore[no-untyped-def]
    """Settle until `is_so` holds, for at most a minute."""
    task = asyncio.create_task(of.run())
    for _ in range(6000):
        if is_so():
            break
        assert not task.done(), task.exception()
        await asyncio.sleep(0.01)
    assert is_so()
    task.cancel()


def test_ledger_entries_are_settled_and_stakes_are_read_back(scene: Scene) -> None:
    settling = scene.settlement()
    scene.contract.deposit(ALICE, 150)
    with pytest.raises(PoolError, match="has staked 0"):
        scene.harness.pool.members.register(ALICE, strangers(), None)
    asyncio.run(settling.read_offered(ALICE, ACCOUNT, ADDRESS))
    scene.harness.pool.members.register(ALICE, strangers(), None, payer=ACCOUNT)
    scene.harness.join(BOB)
    scene.credit(ALICE, "a-1", 30)
    asyncio.run(until(lambda: scene.stakes.at_risk(ALICE) == 150 and not settling.waiting, of=settling))
    assert (scene.credited(ALICE), scene.credited(BOB)) == (30, 0)
    asyncio.run(until(lambda: scene.harness.node(ALICE).staked == 150, of=settling))  # the dashboard reads it there
    scene.harness.pool.db.ledger.append(
        "slashed", {"worker": ALICE, "submission": "a-2", "reason": "proof", "file": "cd" * 32}
    )
    scene.harness.pool.db.nodes.move(ALICE, "ban", "slashed", 0.0)
    asyncio.run(until(lambda: scene.harness.node(ALICE).staked == 0, of=settling))
    settling.finish()
    assert scene.contract.pool() == 150 and not scene.notices


def test_an_unreachable_chain_is_reported_and_nothing_is_lost(scene: Scene) -> None:
    scene.chain.away = True
    settling = scene.settlement()
    scene.harness.join(ALICE)
    scene.credit(ALICE, "a-1", 30)
    asyncio.run(until(lambda: bool(scene.notices), of=settling))
    assert "the chain does not answer; accepted work waits in the ledger" in scene.notices[0]
    with pytest.raises(PoolError, match="cannot read stakes") as caught:
        asyncio.run(settling.read_offered(BOB, ACCOUNT, ADDRESS))
    assert caught.value.status == 503, "the status must make the node repeat its request"
    scene.credit(ALICE, "a-2", 12)
    scene.chain.away = False
    asyncio.run(until(lambda: scene.credited(ALICE) == 42, of=settling))
    assert scene.notices[-1] == "the chain accepts entries again" and len(scene.notices) == 2


def test_the_next_start_settles_the_rest_and_nothing_twice(scene: Scene) -> None:
    first = scene.settlement()
    scene.harness.join(ALICE)
    scene.credit(ALICE, "a-1", 30)
    asyncio.run(until(lambda: scene.credited(ALICE) == 30, of=first))
    scene.chain.away = True
    scene.credit(ALICE, "a-2", 12)
    first.finish()
    scene.chain.away = False
    assert scene.credited(ALICE) == 30
    second = scene.settlement()
    second.finish()
    assert scene.credited(ALICE) == 42
    assert [event.kind for event in scene.contract.events()] == ["registered", "credited", "credited"]


def test_entries_queued_while_settled_ones_are_skipped_are_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = open_pool()
    settling = Settlement(harness.pool.config, harness.pool.db, ChainStakes(), print)
    sent: list[Entry] = []

    def unsettled(entries: Iterable[Entry], contract: object) -> list[Entry]:
        rest = iter(entries)
        next(rest)  # it is settled already
        harness.pool.db.ledger.append("credited", {"number": 2})
        settling._queue_entries()  # `finish` does this while a batch of `run` is still in progress
        return list(rest)

    monkeypatch.setattr(settling, "_contract", lambda thread: None)
    monkeypatch.setattr(credit, "unsettled", unsettled)
    monkeypatch.setattr(credit, "settle", lambda entry, contract: sent.append(entry))
    for number in range(2):
        harness.pool.db.ledger.append("credited", {"number": number})
    settling._queue_entries()
    settling._settle_batch([])
    assert [entry.body for entry in sent] == ['{"number":1}', '{"number":2}'] and not settling.waiting


def test_a_stake_beyond_a_column_is_shown_as_the_largest_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """A contract holds uint256, and a coin has 10^18 units, so 9.3 coins exceed a BIGINT."""
    monkeypatch.setattr(credit, "POLL_S", 0.01)
    harness = open_pool()
    harness.join(ALICE)
    stakes = ChainStakes()
    settling = Settlement(harness.pool.config, harness.pool.db, stakes, print)
    monkeypatch.setattr(settling, "_settle_batch", lambda members: stakes.members.update({ALICE: 93 * 10**17}))
    asyncio.run(until(lambda: any(node.staked for node in harness.pool.db.nodes.all()), of=settling))
    assert [node.staked for node in harness.pool.db.nodes.all() if node.key == ALICE] == [LARGEST]
    assert stakes.at_risk(ALICE) == 93 * 10**17, "decisions use the exact stake"


def test_an_unexpected_error_is_reported_and_settlement_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(credit, "POLL_S", 0.01)
    harness, notices, tries = open_pool(), [], []
    settling = Settlement(harness.pool.config, harness.pool.db, ChainStakes(), notices.append)

    def settle_batch(members: list[str]) -> None:
        tries.append(members)
        if len(tries) < 3:
            raise OverflowError("Python int too large to convert to SQLite INTEGER")

    monkeypatch.setattr(settling, "_settle_batch", settle_batch)
    asyncio.run(until(lambda: len(tries) > 3, of=settling))
    assert "too large" in notices[0] and "again" in notices[1]


def test_a_wrong_contract_or_key_ends_the_coordinator(scene: Scene, tmp_path: Path) -> None:
    scene.chain.address = "0x" + "22" * 20
    with pytest.raises(LedgerError, match="the operator of the contract"):
        asyncio.run(scene.settlement().run())
    scene.chain.address = ACCOUNT
    section = scene.config.ledger.model_copy(update={"contract": "0x" + "33" * 20})
    config = scene.config.model_copy(update={"ledger": section})
    with pytest.raises(LedgerError, match="no contract of Shoal"):
        asyncio.run(Settlement(config, scene.harness.pool.db, scene.stakes, scene.notices.append).run())
    path = tmp_path / "key"
    path.write_text("ab" * 32)
    path.chmod(0o644)
    with pytest.raises(LedgerError, match="others may read"):
        read_key(path)
    path.chmod(0o600)
    assert read_key(path) == "ab" * 32
