"""A validator reads the ledger over real HTTP, co-signs it, and notices if it was truncated or changed."""

import shutil
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from shoal.coordinator import pool as pages
from shoal.ledger.chain import Entry, Head, LedgerError, open_head, sign_head, verify_chain
from shoal.protocol.identity import Identity, Signed
from shoal.protocol.invite import make_invite
from shoal.protocol.messages import Ok
from shoal.protocol.node import Node
from shoal.validator.service import HEAD, WITNESS_S, Witness

from .http.support import PATIENCE_S, RUN, Site, refused, served


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with served(tmp_path / "coordinator") as running:
        yield running


def validator(site: Site, folder: Path, name: str = "validator") -> Node:
    """Return the validator of this name; the same name gives the same node."""
    expires_s = int(time.time()) + 3600
    made = folder / f"{name}.invite"
    invite = make_invite(site.identity, url=site.url, run=RUN, role="validator", name=name, expires_s=expires_s)
    if not made.exists():
        invite.save(made)
    return Node.join(invite, folder / name, patience_s=PATIENCE_S)


def ledger(site: Site, reader: Node) -> list[Entry]:
    """Return the whole ledger, read page by page and verified."""
    entries: list[Entry] = []
    while page := reader.get_bytes(f"/v1/ledger/{len(entries)}", max_bytes=1 << 24):
        entries += [Entry.model_validate_json(line) for line in page.splitlines()]
    verify_chain(entries, site.identity.public)
    return entries


def test_the_newest_entry_is_co_signed_kept_and_recorded(site: Site, tmp_path: Path) -> None:
    node = validator(site, tmp_path)
    before = ledger(site, node)
    witness = Witness(node, tmp_path / "validator")
    witness.sign()
    kept = open_head(Signed.model_validate_json((tmp_path / "validator" / HEAD).read_bytes()), node.identity.public)
    assert (kept.run, kept.seq, kept.digest) == (RUN, before[-1].seq, before[-1].digest)
    *same, last = ledger(site, node)
    assert same == before and last.kind == "witnessed" and node.identity.public in last.body
    witness.sign()
    assert ledger(site, node)[-1] == last, "an entry for a co-signature must not be co-signed itself"
    validator(site, tmp_path, "other")
    witness.sign()
    assert [entry.kind for entry in ledger(site, node)[-2:]] == ["registered", "witnessed"]


def test_a_repeated_head_or_one_of_co_signatures_alone_adds_no_entry(site: Site, tmp_path: Path) -> None:
    node = validator(site, tmp_path)
    entries = ledger(site, node)
    for entry in (entries[-1], entries[-1], entries[0]):
        head = Head(run=RUN, seq=entry.seq, digest=entry.digest)
        node.post("/v1/heads", sign_head(head, node.identity), Ok)
    *same, last = ledger(site, node)
    assert same == entries
    node.post("/v1/heads", sign_head(Head(run=RUN, seq=last.seq, digest=last.digest), node.identity), Ok)
    assert ledger(site, node)[-1] == last


def test_a_validator_co_signs_at_intervals(site: Site, tmp_path: Path) -> None:
    now_s = 0.0
    node = validator(site, tmp_path)
    witness = Witness(node, tmp_path / "validator", lambda: now_s)
    now_s = WITNESS_S - 1
    witness.sign_if_due()
    assert not (tmp_path / "validator" / HEAD).exists()
    now_s = WITNESS_S
    witness.sign_if_due()
    assert (tmp_path / "validator" / HEAD).exists()


def test_a_ledger_of_many_pages_is_read(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "PAGE_BYTES", 1)
    node = validator(site, tmp_path)
    others = [validator(site, tmp_path, f"other-{number}") for number in range(3)]
    Witness(node, tmp_path / "validator").sign()
    assert ledger(site, node)[-1].kind == "witnessed"
    Witness(others[0], tmp_path / "other-0").sign()
    restarted = Witness(node, tmp_path / "validator")
    restarted.sign()
    assert len(ledger(site, node)) == 1 + 4 + 2, "1 started, 4 registered and 2 witnessed must be all"


def test_a_truncated_ledger_is_noticed_after_coordinator_and_validator_restart(tmp_path: Path) -> None:
    folder, earlier = tmp_path / "coordinator", tmp_path / "earlier.sqlite"
    with served(folder) as site:
        node = validator(site, tmp_path)
        with sqlite3.connect(folder / "pool.sqlite") as live, sqlite3.connect(earlier) as copy:
            live.backup(copy)
        validator(site, tmp_path, "forgotten")
        Witness(node, tmp_path / "validator").sign()
    for path in folder.glob("pool.sqlite*"):
        path.unlink()
    shutil.copy(earlier, folder / "pool.sqlite")
    with served(folder) as site:
        again = Node.of(
            make_invite_of(site), Identity.load(tmp_path / "validator" / "identity.pem"), patience_s=PATIENCE_S
        )
        with pytest.raises(LedgerError, match="no longer holds"):
            Witness(again, tmp_path / "validator").sign()


def make_invite_of(site: Site):  # type: ignore[no-untyped-def]
    return make_invite(site.identity, url=site.url, run=RUN, role="validator", name="x", expires_s=2_000_000_000)


def test_a_damaged_head_file_is_reported(site: Site, tmp_path: Path) -> None:
    node = validator(site, tmp_path)
    Witness(node, tmp_path / "validator").sign()
    (tmp_path / "validator" / HEAD).write_text("{")
    with pytest.raises(LedgerError, match=f"{HEAD} is damaged; remove it"):
        Witness(node, tmp_path / "validator").sign()


def test_a_line_that_is_no_entry_is_reported(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = validator(site, tmp_path)
    monkeypatch.setattr(node, "get_bytes", lambda path, max_bytes: b"{}\n")
    with pytest.raises(LedgerError, match="line 1 of the coordinator's ledger after entry 0 is not a ledger entry"):
        Witness(node, tmp_path / "validator").sign()


def test_only_a_head_of_this_ledger_signed_by_its_sender_is_recorded(site: Site, tmp_path: Path) -> None:
    node, other = validator(site, tmp_path), validator(site, tmp_path, "other")
    chain = ledger(site, node)
    head = Head(run=RUN, seq=chain[-1].seq, digest=chain[-1].digest)

    def posted(signed: Signed) -> httpx.Response:
        return site.client(node.identity).post("/v1/heads", json=signed.model_dump(mode="json"))

    refused(posted(sign_head(head, other.identity)), 400, "not a head that", node.identity.public[:16])
    for wrong in ({"digest": "0" * 64}, {"seq": 1}, {"seq": head.seq + 1}, {"run": "another"}):
        refused(posted(sign_head(head.model_copy(update=wrong), node.identity)), 409, "of this ledger differs")
    assert ledger(site, node) == chain, "a refused head was recorded"
    assert posted(sign_head(head, node.identity)).status_code == 200
