import base64
import json
import stat
from pathlib import Path
from typing import Any

import pytest

from shoal.protocol.identity import Identity, Signed
from shoal.protocol.invite import (
    PREFIX,
    AddressError,
    Invite,
    InviteError,
    make_invite,
    open_payload,
    read_invite,
    run_id,
)
from shoal.protocol.messages import InvitePayload

COORDINATOR, OTHER = Identity.generate(), Identity.generate()
RUN = run_id("run-0", COORDINATOR.public)


def invite(identity: Identity = COORDINATOR, run: str = RUN, **changed: Any) -> Invite:
    fields = {"url": "http://c:1", "role": "worker", "name": "w-0", "expires_s": 2_000_000_000} | changed
    return make_invite(identity, run=run, **fields)


def test_a_copied_invite_contains_address_key_run_role_and_name() -> None:
    made = invite()
    assert Invite.decode(f"  {made.encode()}\n") == made
    payload = open_payload(made.signed.model_dump_json(), COORDINATOR.public, RUN)
    assert (made.url, made.key, made.run) == ("http://c:1", COORDINATOR.public, RUN)
    assert (payload.role, payload.name, payload.run, payload.expires_s) == ("worker", "w-0", RUN, 2_000_000_000)
    assert invite().signed.payload != made.signed.payload, "each invite must be different, because it is valid once"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hello",
        "shoal1.",
        "shoal1.%%%",
        "shoal1.é",
        "shoal1.AAAA",
        "shoal1.bnVsbA==",
        "shoal2.AAAA",
        "shoal1." + "[" * 9,
    ],
)
def test_a_text_that_is_not_an_invite_is_refused(text: str) -> None:
    with pytest.raises(InviteError, match="invite"):
        Invite.decode(text)


def test_an_invite_cut_short_anywhere_or_with_more_fields_is_damaged() -> None:
    text = invite().encode()
    more = json.loads(invite().model_dump_json()) | {"more": 1}
    cuts = [text[:cut] for cut in range(len(PREFIX), len(text) - 4, 7)]
    for damaged in (*cuts, PREFIX + base64.urlsafe_b64encode(json.dumps(more).encode()).decode()):
        with pytest.raises(InviteError, match="damaged"):
            Invite.decode(damaged)


def payload_of(domain: str) -> str:
    payload = InvitePayload(run=RUN, role="validator", name="v", nonce="0" * 32, expires_s=1)
    return Signed.make(COORDINATOR, payload.model_dump_json(), domain=domain).model_dump_json()


def changed() -> str:
    signed = invite().signed
    return signed.model_copy(update={"payload": signed.payload.replace("worker", "validator")}).model_dump_json()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (invite(OTHER).signed.model_dump_json(), "not signed by this coordinator"),
        (changed(), "not signed by this coordinator"),
        (payload_of("run"), "not signed by this coordinator"),
        (invite(run="run-1").signed.model_dump_json(), "run-1, but this is run run-0"),
        *((nonsense, "the invite is") for nonsense in ("", "null", "{}", "[]", "\x00", '{"payload": 1}')),
    ],
)
def test_a_payload_by_another_signer_or_for_another_purpose_or_run_is_refused(text: str, words: str) -> None:
    assert open_payload(payload_of("invite"), COORDINATOR.public, RUN).role == "validator"
    with pytest.raises(InviteError, match=words):
        open_payload(text, COORDINATOR.public, RUN)


@pytest.mark.parametrize("name", ["", "-x", "Upper", "a b", "x" * 41, "a/b", "a\x1b[2J"])
def test_an_invalid_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="name"):
        invite(name=name)


def test_an_invite_is_read_from_a_file_that_only_its_owner_may_read(tmp_path: Path) -> None:
    made = invite()
    made.save(tmp_path / "w.invite")
    assert read_invite(str(tmp_path / "w.invite")) == made == read_invite(made.encode())
    assert stat.S_IMODE((tmp_path / "w.invite").stat().st_mode) == 0o600
    for text, words in (("missing.file", "no file at missing.file"), (".", "not readable")):
        with pytest.raises(InviteError, match=words):
            read_invite(text)


@pytest.mark.parametrize("url", ["c:1", "ftp://c:1", "http://c:1/x", ""])
def test_an_invite_with_an_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(AddressError, match="write http://HOST:PORT"):
        invite(url=url)
    with pytest.raises(InviteError, match="damaged"):
        Invite.decode(invite().model_copy(update={"url": url}).encode())


def test_an_invites_role_and_expiry_are_checked() -> None:
    made = invite()
    made.check("worker", now_s=1_999_999_999)
    made.check("worker", now_s=None)
    with pytest.raises(InviteError, match="for the role worker, not relay"):
        made.check("relay", now_s=None)
    with pytest.raises(InviteError, match="the invite for w-0 has expired"):
        made.check("worker", now_s=2_000_000_001)


def test_two_pools_with_the_same_name_have_different_run_ids() -> None:
    """Otherwise a request, a file or a seed of one pool would be valid in the other."""
    ids = [run_id("sums", identity.public) for identity in (COORDINATOR, OTHER)]
    assert ids[0] != ids[1] and all(id.startswith("sums-") for id in ids)
    assert run_id(ids[0], COORDINATOR.public) == ids[0], "a restart must keep the id"


def test_an_invite_to_a_run_of_another_coordinator_is_refused() -> None:
    """If a coordinator could use another run's id, its members' signatures would be valid in that run too."""
    invite(COORDINATOR, RUN).check("worker", None)
    with pytest.raises(InviteError, match="does not belong to the coordinator in the invite"):
        invite(OTHER, RUN).check("worker", None)


@pytest.mark.parametrize(
    ("old", "new"), [('"url":', '"url":"http://evil:1","url":'), ('"url":', '"url": '), ('"run":', '"run":7,"run":')]
)
def test_an_invite_has_one_text(old: str, new: str) -> None:
    made = invite()
    plain = base64.urlsafe_b64decode(made.encode().removeprefix("shoal1.")).decode()
    assert Invite.decode("shoal1." + base64.urlsafe_b64encode(plain.encode()).decode()) == made
    with pytest.raises(InviteError, match="damaged"):
        Invite.decode("shoal1." + base64.urlsafe_b64encode(plain.replace(old, new, 1).encode()).decode())


@pytest.mark.parametrize("run", ["a\x1b[2J", "a\u202eb", "a\nb", ""])
def test_a_run_whose_name_could_mislead_a_reader_has_no_invite(run: str) -> None:
    with pytest.raises(ValueError, match="run"):
        invite(run=run)
