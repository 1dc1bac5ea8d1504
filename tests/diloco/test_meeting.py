"""Sites and their meeting in one process: rounds, sites that leave and return, restarts at every moment."""

import json
import shutil
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

import pytest
import torch

from shoal.diloco import archive
from shoal.diloco.agreed import Agreed, StateError
from shoal.diloco.codec import KINDS
from shoal.diloco.meeting import Meeting
from shoal.diloco.messages import (
    Figures,
    ForgottenError,
    Greeting,
    MeetingError,
    RoundClosedError,
    about_model,
    compare,
)
from shoal.diloco.serve import summary
from shoal.diloco.site import SilenceError, meet
from shoal.files import write_pieces

from .support import ABOUT, SHAPES, Clock, Trainee, digests, initial, joined, open_meeting, rounds, shared_terms, terms


@pytest.mark.parametrize("kind", KINDS)
def test_after_every_round_all_sites_have_the_same_bits(kind, tmp_path):
    meeting = open_meeting(tmp_path, terms(kind=kind, sites=3))
    trainees = joined(meeting, "abc")
    for _ in range(4):
        rounds(trainees, 1)
        assert digests(trainees) == {meeting.agreed.digest}
    assert meeting.round == 4
    with pytest.raises(RoundClosedError, match="not kept"):
        trainees[0].link.outcome(0)
    others = joined(open_meeting(tmp_path / "other", meeting.terms), "abc")
    rounds(others[::-1], 4)
    assert digests(others) == digests(trainees), "the order of arrival changed a bit"


@pytest.mark.parametrize(
    ("items", "weights"), [(4, (2, 1, 1)), (5, (2, 2, 1)), (6, (1, 1, 1)), (2, (1, 1, 0)), (0, (0, 0, 0))]
)
def test_a_site_is_weighted_by_the_work_dealt_to_it(items, weights, tmp_path):
    meeting = open_meeting(tmp_path, terms(kind="fp64", sites=3, lr=1.0, momentum=0.0, items=lambda _: items))
    trainees, before = joined(meeting, "abc"), initial()
    assert trainees[0].link.deal(0) == ["a", "b", "c"]
    for each in trainees:
        each.offer()
    ends = [{name: tensor.clone() for name, tensor in each.tensors.items()} for each in trainees]
    trainees[0].finish()
    for name in SHAPES:
        moved = sum(weight * (end[name] - before[name]) for weight, end in zip(weights, ends, strict=True))
        expected = before[name] + moved / max(1, sum(weights))
        assert torch.allclose(trainees[0].tensors[name], expected, atol=1e-6, rtol=0)


def test_a_dead_site_costs_one_wait_and_a_late_one_is_healed(tmp_path):
    clock = Clock()
    meeting = open_meeting(tmp_path, terms(sites=3), clock)
    a, b, c = joined(meeting, "abc")
    rounds([a, b, c], 1)
    a.offer()
    b.offer()
    assert a.link.outcome(1) == ["c"]
    clock.now_s += 10.0
    a.finish()
    b.finish()
    assert meeting.outcomes[1].missing == ["c"]
    rounds([a, b], 1)  # nobody waits for c
    assert meeting.outcomes[2].missing == []
    with pytest.raises(RoundClosedError, match="round 1 is over; round 3 is open"):
        c.offer()
    c.heal("its round was over")
    c.join()
    rounds([a, b], 1)
    c.heal("its round was over")
    rounds([a, b, c], 1)
    assert digests([a, b, c]) == {meeting.agreed.digest}
    assert meeting.outcomes[4].kept == ["a", "b", "c"]


def test_a_restarted_meeting_still_expects_a_site_that_healed(tmp_path):
    clock = Clock()
    meeting = open_meeting(tmp_path, terms(sites=2), clock)
    a, b = joined(meeting, "ab")
    a.offer()
    clock.now_s += 10.0
    a.finish()
    assert not meeting.members["b"].expected
    b.heal("its round was over")
    meeting = open_meeting(tmp_path, meeting.terms, clock)
    a.connect(meeting)
    a.site.adopt(a.tensors, *a.link.state("the test"))
    rounds([a], 1)
    a.offer()
    assert meeting.round == 2 and meeting.waiting_for() == ["b"]


def test_the_first_round_waits_for_all_sites_but_at_most_wait_s(tmp_path):
    clock = Clock()
    meeting = open_meeting(tmp_path, terms(sites=3), clock)
    (a,) = joined(meeting, "a")
    a.offer()
    (b,) = joined(meeting, "b")
    b.offer()
    assert meeting.round == 0
    clock.now_s += 10.0
    a.finish()
    assert meeting.round == 1 and meeting.outcomes[0].kept == ["a", "b"]


def test_without_a_quorum_a_round_stays_open_and_names_the_missing_sites(tmp_path):
    clock = Clock()
    meeting = open_meeting(tmp_path, terms(sites=2, quorum=2), clock)
    a, b = joined(meeting, "ab")
    a.offer()
    clock.now_s += 1000
    assert not meeting.due()
    with pytest.raises(SilenceError, match="waited 0 s for b: start more sites"):
        meet(a.link, 0, *a.sent, Figures(), give_up_s=0.0)


def test_a_newcomer_starts_from_the_agreed_state_and_is_expected_from_the_next_round(tmp_path):
    meeting = open_meeting(tmp_path, terms(sites=1))
    (a,) = joined(meeting, "a")
    rounds([a], 2)
    (b,) = joined(meeting, "b")
    assert b.site.round == 2 and b.site.agreed.digest == a.site.agreed.digest
    rounds([a], 1)
    assert meeting.outcomes[2].missing == []
    a.offer()
    assert meeting.waiting_for() == ["b"]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e6])
def test_a_broken_site_is_left_out_and_the_others_continue(bad, tmp_path):
    meeting = open_meeting(tmp_path, terms(sites=3, kind="bf16"))
    a, b, c = joined(meeting, "abc")
    rounds([a, b, c], 1)
    c.tensors["embed"][0, 0] = bad
    rounds([a, b, c], 1)
    assert set(meeting.outcomes[1].left_out) == {"c"} and meeting.outcomes[1].kept == ["a", "b"]
    assert digests([a, b, c]) == {meeting.agreed.digest}
    assert all(tensor.isfinite().all() for tensor in c.tensors.values())
    rounds([a, b, c], 1)
    assert meeting.outcomes[2].kept == ["a", "b", "c"]
    before = meeting.agreed.digest
    for each in (a, b, c):
        each.tensors["embed"][0, 0] = float("nan")
    rounds([a, b, c], 1)
    assert meeting.outcomes[3].kept == [] and digests([a, b, c]) == {before}, "if all are broken, nothing may change"


def test_a_site_with_other_bits_is_refused_and_healed(tmp_path):
    meeting = open_meeting(tmp_path, terms(sites=2))
    a, b = joined(meeting, "ab")
    rounds([a, b], 1)
    b.site.agreed.parameters[3] += 1e-3  # a bit flipped in memory
    for each in (a, b):
        each.offer()
    a.finish()
    with pytest.raises(RoundClosedError, match="differs from the others after round 1"):
        b.finish()
    b.heal("differs after round 1")
    assert meeting.healed == {"b": "differs after round 1"}
    rounds([a, b], 1)
    assert digests([a, b]) == {meeting.agreed.digest}
    b.site.agreed.digest = "0" * 64
    with pytest.raises(RoundClosedError, match="the parameters of b differ"):
        b.offer()


@pytest.mark.parametrize("how", ["left out", "late"])
def test_the_rounding_error_of_an_offer_that_does_not_count_is_dropped(how, tmp_path):
    clock = Clock()
    meeting = open_meeting(tmp_path, terms(sites=3, kind="int4"), clock)
    a, b, c = joined(meeting, "abc")
    rounds([a, b, c], 2)
    assert c.site.feedback.left.any()
    if how == "left out":
        for tensor in c.tensors.values():
            tensor[0, 0] = 1e9
        rounds([a, b, c], 1)
        assert list(meeting.outcomes[2].left_out) == ["c"]
    else:
        a.offer()
        b.offer()
        clock.now_s += 10.0
        a.finish()
        with pytest.raises(RoundClosedError, match="round 2 is over"):
            c.offer()
        c.heal("its round was over")
    assert not c.site.feedback.left.any()


WRITES = 4  # number of files written per round; the last write commits the round


@pytest.mark.parametrize("after", [False, True])
def test_a_meeting_killed_at_any_write_resumes_to_the_same_result(after, tmp_path, monkeypatch):
    def run(folder: Path, die_at: int | None) -> tuple[str, int]:
        meeting = open_meeting(folder, terms(sites=2, kind="int4"))
        trainees, writes = joined(meeting, "ab"), 0

        def write(path: Path, data: Iterable[bytes | memoryview]) -> None:
            nonlocal writes
            writes += 1
            if after or writes != die_at:
                write_pieces(path, data)
            if writes == die_at:
                raise KeyboardInterrupt

        monkeypatch.setattr(archive, "write_pieces", write)
        monkeypatch.setattr(archive, "write_file", lambda path, data: write(path, [data]))
        while meeting.round < 2:
            for each in trainees:
                each.train()
                each.sent = each.site.offer(each.tensors)
            try:
                for each in trainees:
                    each.link.offer(each.site.round, *each.sent, Figures())
            except KeyboardInterrupt:
                committed = after and die_at is not None and die_at % WRITES == 0
                meeting = open_meeting(folder, meeting.terms)
                for each in trainees:
                    each.connect(meeting)
                for each in [] if committed else trainees:
                    with pytest.raises(ForgottenError, match="offer it again"):
                        each.link.outcome(each.site.round)
                for each in trainees:  # an offer that already counted may be sent again
                    each.link.offer(each.site.round, *each.sent, Figures())
            for each in trainees:
                each.finish()
            assert digests(trainees) == {meeting.agreed.digest}
        lines = (folder / "rounds.jsonl").read_text().splitlines()
        assert [json.loads(line)["round"] for line in lines] == [0, 1], "each round must be recorded once"
        return digests(trainees).pop(), writes

    expected, writes = run(tmp_path / "whole", None)
    assert writes == 2 * WRITES
    for die_at in range(1, writes + 1):
        assert run(tmp_path / str(die_at), die_at)[0] == expected, f"killed at write {die_at}"


def test_an_incomplete_line_of_the_record_is_dropped(tmp_path):
    meeting = open_meeting(tmp_path, terms(sites=1))
    (a,) = joined(meeting, "a")
    rounds([a], 2)
    with (tmp_path / "rounds.jsonl").open("a") as file:
        file.write('{"round": 2, "kep')
    a.connect(open_meeting(tmp_path, meeting.terms))
    rounds([a], 1)
    lines = (tmp_path / "rounds.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [0, 1, 2]


DIFFERS: list[tuple[dict[str, str], str]] = [
    (ABOUT | {"model": "xyz"}, "b has another model: xyz, and the run has abc; give every site the same model"),
    # The error names the model first, and does not reveal the run's data.
    (ABOUT | {"model": "xyz", "data": "other"}, "b has another model"),
    (ABOUT | {"tokenizer": "t"}, "another tokenizer: t, and the run has none"),
    ({"model": "abc"}, "another sites.inner_steps: none"),
]


@pytest.mark.parametrize(("about", "message"), DIFFERS)
def test_the_error_for_a_site_or_folder_of_another_run_names_the_difference(about, message, tmp_path):
    meeting = open_meeting(tmp_path, terms(sites=2))
    with pytest.raises(MeetingError, match=message):
        Trainee("b", meeting).join(about)
    assert meeting.members.named == {}
    with pytest.raises(MeetingError, match="another"):
        Meeting(tmp_path, terms(), about, "run", lambda: pytest.fail("a new state was made"))
    Trainee("a", meeting).join(ABOUT | {"data": "ours"})
    with pytest.raises(
        MeetingError, match="b has another data: other, and the run has ours from a, which joined first"
    ):
        Trainee("b", meeting).join(ABOUT | {"data": "other"})


@pytest.mark.parametrize(("file", "what"), [("config.json", "model"), ("tokenizer.json", "tokenizer")])
def test_a_site_with_another_model_or_tokenizer_is_refused(file, what, tiny_folder, tmp_path):
    other = Path(shutil.copytree(tiny_folder, tmp_path / "other"))
    compare("site-1", about_model(other), about_model(tiny_folder))
    (other / file).write_text(json.dumps(json.loads((other / file).read_text()) | {"version": "another"}))
    with pytest.raises(MeetingError, match=f"site-1 has another {what}: .* give every site the same {what}$"):
        compare("site-1", about_model(other) | {"data": "x"}, about_model(tiny_folder) | {"data": "y"})


def test_every_share_is_given_once_and_lost_shares_are_counted(tmp_path):
    meeting = open_meeting(tmp_path, terms(sites=2))
    a, b = joined(meeting, "ab")
    assert [a.link.take(), b.link.take(), a.link.take()] == [0, 1, 2]
    meeting = open_meeting(tmp_path, meeting.terms)  # a restart gives no share twice
    a.connect(meeting)
    assert a.link.take() == 3
    assert meeting.members.unfinished() == 0
    meeting.leave("a")
    assert meeting.members.unfinished() == 1  # until a returns and knows where in the data it continues
    meeting.join("a", Greeting(about=ABOUT, placed=True))
    assert meeting.members.unfinished() == 0
    meeting.join("b", Greeting(about=ABOUT, placed=False))  # b has lost its folder
    assert meeting.members.unfinished() == 1


def test_sites_of_different_speeds_that_leave_and_return_never_get_the_same_share(tmp_path):
    clock = Clock()
    meeting = open_meeting(tmp_path, terms(sites=2), clock)
    a, b = joined(meeting, "ab")
    take = meeting.members.take
    shares = [take("a") for _ in range(16)]  # before the other site has taken any
    for offering in ([b, a], [a], [a], [b, a]):
        for each in offering:
            each.heal("it returns")
        shares += [take(each.name) for _ in range(20) for each in offering]
        for each in offering:
            each.offer()
        clock.now_s += 10.0
        for each in offering:
            each.finish()
    assert shares == list(range(16 + 6 * 20))


def test_the_work_of_a_round_is_dealt_once_and_all_sites_get_the_same_answer(tmp_path):
    clock = Clock()
    meeting = open_meeting(tmp_path, shared_terms(sites=3), clock)
    a, b = joined(meeting, "ab")
    assert a.link.deal(0) == []  # c is not here yet
    (c,) = joined(meeting, "c")
    assert a.link.deal(0) == b.link.deal(0) == ["a", "b", "c"]
    meeting = open_meeting(tmp_path, meeting.terms, clock)  # a restart does not deal the work again
    for each in (a, b, c):
        each.connect(meeting)
    (d,) = joined(meeting, "d")
    assert d.link.deal(0) == c.link.deal(0) == ["a", "b", "c"]  # d joined too late for this round
    with pytest.raises(RoundClosedError, match="d has no share of the work of round 0"):
        d.offer()
    a.offer()
    b.offer()
    clock.now_s += 10.0
    a.finish()
    assert meeting.outcomes[0].dealt == ["a", "b", "c"] and meeting.outcomes[0].missing == ["c"]
    assert meeting.members.unfinished() == 1  # the share of c
    with pytest.raises(RoundClosedError, match="round 0 is over"):
        c.link.deal(0)
    b.finish()
    assert b.link.deal(1) == ["a", "b", "d"]


def test_if_the_sites_that_share_a_round_fall_silent_the_others_get_its_work(tmp_path):
    clock = Clock()
    meeting = open_meeting(tmp_path, shared_terms(), clock)
    (a,) = joined(meeting, "a")
    assert a.link.deal(0) == ["a"]
    b, c = joined(meeting, "bc")
    assert b.link.deal(0) == ["a"]
    clock.now_s += 9.0
    assert c.link.deal(0) == ["a"]
    clock.now_s += 1.0
    assert b.link.deal(0) == ["b", "c"]
    meeting = open_meeting(tmp_path, meeting.terms, clock)
    for each in (a, b, c):
        each.connect(meeting)
    assert c.link.deal(0) == ["b", "c"] and a.link.deal(0) == ["a"]
    rounds([b, c], 1)
    assert meeting.outcomes[0].dealt == meeting.outcomes[0].kept == ["b", "c"]
    with pytest.raises(RoundClosedError, match="round 0 is over"):
        a.offer()


def test_only_the_deal_of_the_first_offer_counts(tmp_path):
    """Otherwise two sites could train on the same share."""
    clock = Clock()
    meeting = open_meeting(tmp_path, shared_terms(), clock)
    a, c = joined(meeting, "ac")
    assert a.link.deal(0) == ["a", "c"]
    (b,) = joined(meeting, "b")
    assert b.link.deal(0) == ["a", "c"]
    clock.now_s += 10.0
    assert b.link.deal(0) == ["b"]
    a.offer()
    assert b.link.deal(0) == ["a", "c"]
    with pytest.raises(RoundClosedError, match="b has no share of the work of round 0"):
        b.offer()
    c.offer()
    a.finish()
    c.finish()
    b.heal("its share does not count")
    assert meeting.outcomes[0].kept == ["a", "c"] and digests([a, b, c]) == {meeting.agreed.digest}
    assert a.link.deal(1) == ["a", "b", "c"]


def test_a_site_that_joins_during_a_long_round_takes_no_work_from_the_others(tmp_path):
    clock = Clock()
    meeting = open_meeting(tmp_path, shared_terms(), clock)
    (a,) = joined(meeting, "a")
    for round in range(2):
        assert a.link.deal(round) == ["a"]
        (b,) = joined(meeting, "b") if round else [a]
        assert b.link.deal(round) == ["a"]
        clock.now_s += 100.0
        assert b.link.deal(round) == ["a"], "the last round took as long as this one"
        rounds([a], 1)


def test_a_round_waits_for_the_sites_that_share_it_unless_they_left(tmp_path):
    clock = Clock()
    meeting = open_meeting(tmp_path, shared_terms(sites=2), clock)
    a, b = joined(meeting, "ab")
    assert a.link.deal(0) == ["a", "b"]
    rounds([a, b], 1)
    (c,) = joined(meeting, "c")
    assert c.link.deal(1) == ["a", "b", "c"]
    a.offer()
    b.offer()
    assert meeting.waiting_for() == ["c"]
    c.link.leave()
    a.finish()
    assert meeting.outcomes[1].kept == ["a", "b"]


def test_every_agreed_state_is_published_once_and_the_last_one_again_after_a_restart(tmp_path):
    seen: list[tuple[int, str]] = []

    def opened() -> Meeting:
        agreed = Agreed.of(initial(), terms().shapes)
        return Meeting(
            *(tmp_path, terms(sites=1), ABOUT, "run", lambda: agreed),
            publish=lambda round, now: seen.append((round, now.digest)),
        )

    (a,) = joined(opened(), "a")
    rounds([a], 2)
    opened()
    assert [round for round, _ in seen] == [0, 1, 2, 2]
    assert seen[2] == seen[3] == (2, a.site.agreed.digest)


def test_the_sites_figures_are_in_the_log_and_in_the_record(tmp_path):
    meeting = open_meeting(tmp_path, terms(sites=2))
    a, b = joined(meeting, "ab")
    a.train()
    a.link.offer(0, *a.site.offer(a.tensors), Figures(loss=2.5, computed_s=9.0, synced_s=1.0))
    b.offer()
    line = summary(meeting.outcomes[0], 100)
    assert "round 1 of 100: a loss 2.5, 90 % computing, 0 % waiting for data, 10 % waiting for sites; b " in line
    [line] = (tmp_path / "rounds.jsonl").read_text().splitlines()
    assert json.loads(line)["figures"]["a"]["loss"] == 2.5


def flip(path: Path, at: int) -> None:
    """Flip one bit of byte `at`, counted from the end if negative."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["state-000002.safetensors", "rounding-000002.safetensors", "meeting.json"])
def test_a_meeting_with_a_flipped_bit_is_not_opened(name, tmp_path):
    meeting = open_meeting(tmp_path, terms(sites=2, momentum=0.9))
    rounds(joined(meeting, "ab"), 2)
    whole = (tmp_path / name).read_bytes()
    for at in (0, 9, len(whole) // 4, len(whole) // 2, -len(whole) // 4, -3):  # in the header and throughout the data
        (tmp_path / name).write_bytes(whole)
        flip(tmp_path / name, at)
        with pytest.raises(StateError, match=rf"{name} is damaged: .* Restore the meeting's folder from a backup"):
            open_meeting(tmp_path, meeting.terms)
    (tmp_path / name).write_bytes(whole)
    assert open_meeting(tmp_path, meeting.terms).agreed.digest == meeting.agreed.digest


def test_a_site_adopts_the_state_if_the_average_is_damaged(tmp_path):
    meeting = open_meeting(tmp_path, terms(sites=2))
    a, b = joined(meeting, "ab")
    a.offer()
    b.offer()
    a.finish()
    flip(meeting.archive.path("average", 0), -1)
    with pytest.raises(RoundClosedError, match=r"average of round 0 is lost: .*average-000000.safetensors is damaged"):
        b.finish()
    b.heal("the average is lost")
    assert digests([a, b]) == {meeting.agreed.digest}
    descriptor, path = meeting.state()
    assert descriptor.sha256 == sha256(path.read_bytes()).hexdigest()
    flip(path, -1)
    assert meeting.state()[0] == descriptor, "the descriptor must keep the hash from before"
