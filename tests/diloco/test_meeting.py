"""Sites and their meeting in one process: rounds, members who come and go, restarts at every moment."""

import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shoal.diloco import archive
from shoal.diloco.agreed import Agreed, Shapes, StateError
from shoal.diloco.codec import KINDS, Kind
from shoal.diloco.meeting import Meeting
from shoal.diloco.messages import (
    Figures,
    ForgottenError,
    Greeting,
    MeetingError,
    RoundClosedError,
    Terms,
    about_model,
    compare,
)
from shoal.diloco.serve import summary
from shoal.diloco.site import SilenceError, Site, meet
from shoal.files import write_pieces
from tests.diloco.direct import Direct

SHAPES = {"model.layers.0.w": (20, 5), "model.layers.1.w": (20, 5), "embed": (30, 4)}
ABOUT = {"model": "abc", "sites.inner_steps": "50"}


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def start() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {name: torch.randn(*shape, generator=draw) for name, shape in SHAPES.items()}


def terms(**changed: object) -> Terms:
    return replace(Terms(Shapes(SHAPES), rounds=100, wait_s=10.0), **changed)  # type: ignore[arg-type]


class Trainee:
    """A site whose training is random numbers of its own."""

    def __init__(self, name: str, meeting: Meeting) -> None:
        self.name, self.terms = name, meeting.terms
        self.tensors = start()
        self.site = Site(name, self.terms, Agreed.of(self.tensors, self.terms.shapes))
        self.reach(meeting)

    def reach(self, meeting: Meeting) -> None:
        self.exchange = Direct(meeting, self.name)

    def join(self, about: dict[str, str] = ABOUT) -> None:
        self.exchange.join(Greeting(about=about, placed=True))
        self.heal("joins")

    def heal(self, why: str) -> None:
        self.site.adopt(self.tensors, *self.exchange.state(why))

    def train(self) -> None:
        draw = torch.Generator().manual_seed(hash((len(self.name), ord(self.name[-1]), self.site.round)) % 2**31)
        for tensor in self.tensors.values():
            tensor += torch.randn(tensor.shape, generator=draw) * 0.01

    def offer(self) -> None:
        self.train()
        self.sent = self.site.offer(self.tensors)
        self.exchange.offer(self.site.round, *self.sent)

    def finish(self) -> None:
        found = self.exchange.outcome(self.site.round)
        assert isinstance(found, tuple)
        self.site.apply(self.tensors, *found)


def found(folder: Path, terms: Terms, clock: Callable[[], float] | None = None) -> Meeting:
    return Meeting(folder, terms, ABOUT, "run", lambda: Agreed.of(start(), terms.shapes), clock or Clock())


def together(meeting: Meeting, names: str) -> list[Trainee]:
    trainees = [Trainee(name, meeting) for name in names]
    for each in trainees:
        each.join()
    return trainees


def rounds(trainees: list[Trainee], count: int) -> None:
    for _ in range(count):
        for each in trainees:
            each.offer()
        for each in trainees:
            each.finish()


def digests(trainees: list[Trainee]) -> set[str]:
    return {each.site.agreed.digest for each in trainees}


@pytest.mark.parametrize("kind", KINDS)
def test_after_every_round_all_sites_hold_the_same_bits(kind: Kind, tmp_path: Path) -> None:
    meeting = found(tmp_path, terms(kind=kind, sites=3))
    trainees = together(meeting, "abc")
    for _ in range(4):
        rounds(trainees, 1)
        assert digests(trainees) == {meeting.agreed.digest}
    assert meeting.round == 4
    others = together(found(tmp_path / "other", meeting.terms), "abc")
    rounds(others[::-1], 4)
    assert digests(others) == digests(trainees), "the order of arrival changes no bit"


@pytest.mark.parametrize(
    ("items", "weights"), [(4, (2, 1, 1)), (5, (2, 2, 1)), (6, (1, 1, 1)), (2, (1, 1, 0)), (0, (0, 0, 0))]
)
def test_a_site_counts_by_the_work_that_it_was_dealt(items: int, weights: tuple[int, ...], tmp_path: Path) -> None:
    meeting = found(tmp_path, terms(kind="fp64", sites=3, lr=1.0, momentum=0.0, items=lambda _: items))
    trainees, before = together(meeting, "abc"), start()
    assert trainees[0].exchange.deal(0) == ["a", "b", "c"]
    for each in trainees:
        each.offer()
    ends = [{name: tensor.clone() for name, tensor in each.tensors.items()} for each in trainees]
    trainees[0].finish()
    for name in SHAPES:
        moved = sum(weight * (end[name] - before[name]) for weight, end in zip(weights, ends, strict=True))
        expected = before[name] + moved / max(1, sum(weights))
        assert torch.allclose(trainees[0].tensors[name], expected, atol=1e-6, rtol=0)


def test_a_dead_site_costs_one_wait_and_is_named_and_a_late_one_is_healed(tmp_path: Path) -> None:
    clock = Clock()
    meeting = found(tmp_path, terms(sites=3), clock)
    a, b, c = together(meeting, "abc")
    rounds([a, b, c], 1)
    a.offer()
    b.offer()
    assert a.exchange.outcome(1) == ["c"]
    clock.now_s += 10.0
    a.finish()
    b.finish()
    assert meeting.outcomes[1].missing == ["c"]
    rounds([a, b], 1)  # at once: nobody waits for c
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


def test_a_meeting_that_is_restarted_still_expects_a_site_that_healed(tmp_path: Path) -> None:
    clock = Clock()
    meeting = found(tmp_path, terms(sites=2), clock)
    a, b = together(meeting, "ab")
    a.offer()
    clock.now_s += 10.0
    a.finish()
    assert not meeting.members["b"].expected
    b.heal("its round was over")
    meeting = found(tmp_path, meeting.terms, clock)
    a.reach(meeting)
    a.site.adopt(a.tensors, *a.exchange.state("the test"))
    rounds([a], 1)
    a.offer()
    assert meeting.round == 2 and meeting.waiting_for() == ["b"]


def test_the_first_round_waits_for_all_sites_of_the_run_and_is_dealt_without_them_after_the_wait(
    tmp_path: Path,
) -> None:
    clock = Clock()
    meeting = found(tmp_path, terms(sites=3), clock)
    (a,) = together(meeting, "a")
    assert a.exchange.deal(0) == []
    a.offer()
    (b,) = together(meeting, "b")
    b.offer()
    assert meeting.round == 0
    clock.now_s += 10.0
    assert a.exchange.deal(0) == ["a", "b"]
    a.finish()
    assert meeting.round == 1


def test_without_a_quorum_a_round_stays_open_and_says_for_whom(tmp_path: Path) -> None:
    clock = Clock()
    meeting = found(tmp_path, terms(sites=2, quorum=2), clock)
    a, b = together(meeting, "ab")
    a.offer()
    clock.now_s += 1000
    assert not meeting.due()
    with pytest.raises(SilenceError, match="waited 0 s for b: start more sites"):
        meet(a.exchange, 0, *a.sent, Figures(), give_up_s=0.0)


def test_a_newcomer_starts_from_the_state_and_is_awaited_from_the_next_round(tmp_path: Path) -> None:
    meeting = found(tmp_path, terms(sites=1))
    (a,) = together(meeting, "a")
    rounds([a], 2)
    (b,) = together(meeting, "b")
    assert b.site.round == 2 and b.site.agreed.digest == a.site.agreed.digest
    rounds([a], 1)
    assert meeting.outcomes[2].missing == []
    a.offer()
    assert meeting.waiting_for() == ["b"]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e6])
def test_a_broken_site_is_left_out_and_named_and_the_others_go_on(bad: float, tmp_path: Path) -> None:
    meeting = found(tmp_path, terms(sites=3, kind="bf16"))
    a, b, c = together(meeting, "abc")
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
    assert meeting.outcomes[3].kept == [] and digests([a, b, c]) == {before}, "if all are broken nothing moves"


def test_a_site_with_other_bits_is_refused_and_healed(tmp_path: Path) -> None:
    meeting = found(tmp_path, terms(sites=2))
    a, b = together(meeting, "ab")
    rounds([a, b], 1)
    b.site.agreed.parameters[3] += 1e-3  # a bit that flipped in memory
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
def test_what_rounding_left_of_an_offer_that_does_not_count_is_dropped(how: str, tmp_path: Path) -> None:
    clock = Clock()
    meeting = found(tmp_path, terms(sites=3, kind="int4"), clock)
    a, b, c = together(meeting, "abc")
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


WRITES = 4  # of a round; the last one commits it


@pytest.mark.parametrize("after", [False, True])
def test_a_meeting_that_is_killed_at_any_write_goes_on_as_if_it_was_not(
    after: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(folder: Path, die_at: int | None) -> tuple[str, int]:
        meeting = found(folder, terms(sites=2, kind="int4"))
        trainees, writes = together(meeting, "ab"), 0

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
                    each.exchange.offer(each.site.round, *each.sent)
            except KeyboardInterrupt:
                committed = after and die_at is not None and die_at % WRITES == 0
                meeting = found(folder, meeting.terms)
                for each in trainees:
                    each.reach(meeting)
                for each in [] if committed else trainees:
                    with pytest.raises(ForgottenError, match="offer it again"):
                        each.exchange.outcome(each.site.round)
                for each in trainees:  # one that counted already may be given again
                    each.exchange.offer(each.site.round, *each.sent)
            for each in trainees:
                each.finish()
            assert digests(trainees) == {meeting.agreed.digest}
        lines = (folder / "rounds.jsonl").read_text().splitlines()
        assert [json.loads(line)["round"] for line in lines] == [0, 1], "each round is on record once"
        return digests(trainees).pop(), writes

    expected, writes = run(tmp_path / "whole", None)
    assert writes == 2 * WRITES
    for die_at in range(1, writes + 1):
        assert run(tmp_path / str(die_at), die_at)[0] == expected, f"killed at write {die_at}"


def test_a_half_written_line_of_the_record_is_dropped(tmp_path: Path) -> None:
    meeting = found(tmp_path, terms(sites=1))
    (a,) = together(meeting, "a")
    rounds([a], 2)
    with (tmp_path / "rounds.jsonl").open("a") as file:
        file.write('{"round": 2, "kep')
    a.reach(found(tmp_path, meeting.terms))
    rounds([a], 1)
    lines = (tmp_path / "rounds.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [0, 1, 2]


def test_an_outcome_that_was_not_fetched_yet_survives_a_restart(tmp_path: Path) -> None:
    meeting = found(tmp_path, terms(sites=2))
    a, b = together(meeting, "ab")
    a.offer()
    b.offer()
    a.finish()
    meeting = found(tmp_path, meeting.terms)
    b.reach(meeting)
    b.finish()
    assert digests([a, b]) == {meeting.agreed.digest}
    a.reach(meeting)
    rounds([a, b], 2)
    b.site.round = 0
    with pytest.raises(RoundClosedError, match="not kept"):
        b.exchange.outcome(0)


DIFFERS: list[tuple[dict[str, str], str]] = [
    (ABOUT | {"model": "xyz"}, "b has another model: xyz, and the run has abc; give every site the same model"),
    (ABOUT | {"model": "xyz", "data": "other"}, "b has another model"),  # which data the run has it is not told
    (ABOUT | {"tokenizer": "t"}, "another tokenizer: t, and the run has none"),
    ({"model": "abc"}, "another sites.inner_steps: none"),
]


@pytest.mark.parametrize(("about", "words"), DIFFERS)
def test_a_site_or_a_folder_of_another_run_is_told_what_differs(
    about: dict[str, str], words: str, tmp_path: Path
) -> None:
    meeting = found(tmp_path, terms(sites=2))
    with pytest.raises(MeetingError, match=words):
        Trainee("b", meeting).join(about)
    assert meeting.members.named == {}
    with pytest.raises(MeetingError, match="another"):
        Meeting(tmp_path, terms(), about, "run", lambda: pytest.fail("there is a state already"))
    Trainee("a", meeting).join(ABOUT | {"data": "ours"})
    with pytest.raises(MeetingError, match="b has another data: other, and the run has ours"):
        Trainee("b", meeting).join(ABOUT | {"data": "other"})


@pytest.mark.parametrize(("file", "what"), [("config.json", "model"), ("tokenizer.json", "tokenizer")])
def test_a_site_with_another_model_or_tokenizer_is_told_which(
    file: str, what: str, tiny_folder: Path, tmp_path: Path
) -> None:
    other = Path(shutil.copytree(tiny_folder, tmp_path / "other"))
    compare("site-1", about_model(other), about_model(tiny_folder))
    (other / file).write_text(json.dumps(json.loads((other / file).read_text()) | {"version": "another"}))
    with pytest.raises(MeetingError, match=f"site-1 has another {what}: .* give every site the same {what}$"):
        compare("site-1", about_model(other) | {"data": "x"}, about_model(tiny_folder) | {"data": "y"})


def test_every_share_is_given_once_and_what_is_lost_is_counted(tmp_path: Path) -> None:
    meeting = found(tmp_path, terms(sites=2))
    a, b = together(meeting, "ab")
    assert [a.exchange.take(), b.exchange.take(), a.exchange.take()] == [0, 1, 2]
    meeting = found(tmp_path, meeting.terms)  # a restart gives no share twice
    a.reach(meeting)
    assert a.exchange.take() == 3
    assert meeting.members.unfinished() == 0
    meeting.leave("a")
    assert meeting.members.unfinished() == 1  # unless it comes back with its place
    meeting.join("a", Greeting(about=ABOUT, placed=True))
    assert meeting.members.unfinished() == 0
    meeting.join("b", Greeting(about=ABOUT, placed=False))  # its folder is gone
    assert meeting.members.unfinished() == 1


def test_the_work_of_a_round_is_dealt_once_and_equally_to_all_who_ask(tmp_path: Path) -> None:
    clock = Clock()
    meeting = found(tmp_path, terms(sites=3), clock)
    a, b = together(meeting, "ab")
    assert a.exchange.deal(0) == []  # c is not here yet
    (c,) = together(meeting, "c")
    assert a.exchange.deal(0) == b.exchange.deal(0) == ["a", "b", "c"]
    meeting = found(tmp_path, meeting.terms, clock)  # a restart deals nothing again
    for each in (a, b, c):
        each.reach(meeting)
    (d,) = together(meeting, "d")
    assert d.exchange.deal(0) == c.exchange.deal(0) == ["a", "b", "c"]  # d came too late for this round
    with pytest.raises(RoundClosedError, match="the work of round 0 was shared before d came"):
        d.offer()
    a.offer()
    b.offer()
    clock.now_s += 10.0
    a.finish()
    assert meeting.outcomes[0].dealt == ["a", "b", "c"] and meeting.outcomes[0].missing == ["c"]
    assert meeting.members.unfinished() == 1  # what c was to do
    with pytest.raises(RoundClosedError, match="round 0 is over"):
        c.exchange.deal(0)
    b.finish()
    assert b.exchange.deal(1) == ["a", "b", "d"]


def test_a_round_waits_for_the_sites_that_share_it_and_for_none_that_left(tmp_path: Path) -> None:
    clock = Clock()
    meeting = found(tmp_path, terms(sites=2), clock)
    a, b = together(meeting, "ab")
    rounds([a, b], 1)
    (c,) = together(meeting, "c")
    assert c.exchange.deal(1) == ["a", "b", "c"]
    a.offer()
    b.offer()
    assert meeting.waiting_for() == ["c"]
    c.exchange.leave()
    a.finish()
    assert meeting.outcomes[1].kept == ["a", "b"]


def test_every_agreed_state_is_published_once_and_after_a_restart_the_last_one_again(tmp_path: Path) -> None:
    seen: list[tuple[int, str]] = []

    def opened() -> Meeting:
        agreed = Agreed.of(start(), terms().shapes)
        return Meeting(
            *(tmp_path, terms(sites=1), ABOUT, "run", lambda: agreed),
            publish=lambda round, now: seen.append((round, now.digest)),
        )

    (a,) = together(opened(), "a")
    rounds([a], 2)
    opened()
    assert [round for round, _ in seen] == [0, 1, 2, 2]
    assert seen[2] == seen[3] == (2, a.site.agreed.digest)


def test_what_sites_say_of_themselves_is_in_the_log_and_in_the_record(tmp_path: Path) -> None:
    meeting = found(tmp_path, terms(sites=2))
    a, b = together(meeting, "ab")
    a.train()
    a.exchange.offer(0, *a.site.offer(a.tensors), Figures(loss=2.5, computed_s=9.0, synced_s=1.0))
    b.offer()
    told = summary(meeting.outcomes[0], 100)
    assert "round 1 of 100: a loss 2.5, 90 % computing, 0 % waiting for data, 10 % for sites; b " in told
    [line] = (tmp_path / "rounds.jsonl").read_text().splitlines()
    assert json.loads(line)["figures"]["a"]["loss"] == 2.5


def flip(path: Path, at: int) -> None:
    """Flip one bit of byte `at`, counted from the end if negative."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["state-000002.safetensors", "rounding-000002.safetensors", "meeting.json"])
def test_a_meeting_with_one_flipped_bit_is_not_opened(name: str, tmp_path: Path) -> None:
    meeting = found(tmp_path, terms(sites=2, momentum=0.9))
    rounds(together(meeting, "ab"), 2)
    whole = (tmp_path / name).read_bytes()
    for at in (0, 9, len(whole) // 4, len(whole) // 2, -len(whole) // 4, -3):  # header, each fragment, velocity
        (tmp_path / name).write_bytes(whole)
        flip(tmp_path / name, at)
        with pytest.raises(StateError, match=rf"{name} is damaged: .* Restore the meeting's folder from a backup"):
            found(tmp_path, meeting.terms)
    (tmp_path / name).write_bytes(whole)
    assert found(tmp_path, meeting.terms).agreed.digest == meeting.agreed.digest


def test_a_site_whose_average_was_damaged_takes_over_the_state(tmp_path: Path) -> None:
    meeting = found(tmp_path, terms(sites=2))
    a, b = together(meeting, "ab")
    a.offer()
    b.offer()
    a.finish()
    flip(meeting.archive.path("average", 0), -1)
    with pytest.raises(RoundClosedError, match=r"average of round 0 is lost: .*average-000000.safetensors is damaged"):
        b.finish()
    b.heal("the average is lost")
    assert digests([a, b]) == {meeting.agreed.digest}
    described, path = meeting.state()
    assert described.sha256 == sha256(path.read_bytes()).hexdigest()
    flip(path, -1)
    assert meeting.state()[0] == described, "what changed on disk is not what the meeting describes"
