"""The curriculum: weights from pages, draws that follow the weights and are the same on every machine."""

import hashlib
from collections import Counter
from fractions import Fraction

import pytest

from shoal import tasks
from shoal.config import parse
from shoal.config.tasks import SourceSection, TaskSection
from shoal.protocol.messages import MILLION, CurriculumPage
from shoal.tasks.curriculum import FLOOR, MEMORY, Curriculum, CurriculumError, Rate, after, draw, weight
from shoal.tasks.derive import plan_submission

from ..workers import assignment

SCORED = {3: (8, 4), 7: (8, 0), 20: (32, 32)}  # task: rollouts, of which right


def page(step: int, scored: dict[int, tuple[int, int]], previous: str = "") -> CurriculumPage:
    rows = [(task, rollouts, right * MILLION) for task, (rollouts, right) in sorted(scored.items())]
    return CurriculumPage(step=step, previous=previous, tasks=rows)


FIRST = page(1, SCORED)
SECOND = page(2, {3: (8, 8), 5: (4, 1)}, FIRST.digest())
BY_DIGEST = {one.digest(): one for one in (FIRST, SECOND)}
RATES = after({}, FIRST)


def random(n: int) -> bytes:
    return hashlib.sha256(n.to_bytes(4, "big")).digest()


def exact(rollouts: int, right: int) -> Fraction:
    """The formula of the docs."""
    p = Fraction(right + 1, rollouts + 2)
    return max(4 * p * (1 - p), Fraction(1, FLOOR))


@pytest.mark.parametrize(("rollouts", "right"), [(0, 0), (8, 4), (8, 0), (8, 8), (16, 1), (60, 60)])
def test_a_weight_is_the_variance_of_the_smoothed_rate_with_a_floor(rollouts: int, right: int) -> None:
    assert Fraction(*weight(Rate(rollouts * MILLION, right * MILLION))) == exact(rollouts, right)


def test_an_unseen_task_has_the_largest_weight() -> None:
    assert Fraction(*weight(None)) == 1


def test_tasks_are_drawn_by_their_weights() -> None:
    n_tasks, n_draws = 24, 12_000
    drawn = Counter(draw(random(n), lambda b: int.from_bytes(b[:8], "big") % n_tasks, RATES) for n in range(n_draws))
    weights = {task: float(exact(*SCORED.get(task, (0, 0)))) for task in range(n_tasks)}
    for task, share in weights.items():
        expected = n_draws * share / sum(weights.values())
        assert abs(drawn[task] - expected) < 5 * expected**0.5, f"task {task}"
    assert drawn[20] < drawn[7] < drawn[3], "solved, unsolved, half solved"


def test_draws_are_these_on_every_machine() -> None:
    found = [draw(random(n), lambda b: int.from_bytes(b[:8], "big") % 24, RATES) for n in range(12)]
    assert found == [6, 2, 14, 23, 1, 11, 6, 8, 13, 23, 9, 2]


def test_sources_keep_their_shares() -> None:
    plus = SourceSection(name="plus", generator="arithmetic", weight=3)
    minus = SourceSection(name="minus", generator="arithmetic", options={"operations": ["-"]})
    found = tasks.load(TaskSection(sources=[plus, minus]))
    solved = {n: Rate(64 * MILLION, 64 * MILLION) for n, task in enumerate(found.train) if task.source == "plus"}
    drawn = [found.train[draw(random(n), found.pick, solved)].source for n in range(2000)]
    assert 1400 < drawn.count("plus") < 1600, "solving all of a source does not end it"


def test_pages_add_up_and_old_rollouts_fade() -> None:
    rates = after(RATES, SECOND)
    assert rates[3] == Rate(16 * MILLION, 12 * MILLION) and rates[5] == Rate(4 * MILLION, MILLION)
    assert RATES[3] == Rate(8 * MILLION, 4 * MILLION), "earlier rates stay as they were"
    faded = after({1: Rate(MEMORY * MILLION, MEMORY * MILLION)}, page(3, {1: (8, 0)}))
    assert faded[1] == Rate((MEMORY + 8) * MILLION // 2, MEMORY * MILLION // 2)


def test_a_chain_is_fetched_once_and_older_assignments_find_their_rates() -> None:
    asked: list[str] = []

    def fetch(digest: str) -> CurriculumPage:
        asked.append(digest)
        return BY_DIGEST[digest]

    curriculum = Curriculum(fetch)
    newest = curriculum.rates(SECOND.digest())
    assert newest == after(RATES, SECOND) and asked == [SECOND.digest(), FIRST.digest()]
    assert curriculum.rates(FIRST.digest()) == RATES and curriculum.rates("") == {}
    assert curriculum.rates(SECOND.digest()) == newest and len(asked) == 2


def test_rates_of_long_ago_are_computed_again() -> None:
    pages, previous = {}, ""
    for step in range(1, 20):
        one = page(step, {step: (1, 1)}, previous)
        previous = one.digest()
        pages[previous] = one
    curriculum = Curriculum(pages.__getitem__)
    first, *_, last = pages
    assert set(curriculum.rates(last)) == set(range(1, 20))
    assert set(curriculum.rates(first)) == {1}
    assert len(curriculum._rates) <= 10, "memory is bounded"


def test_a_page_that_is_not_the_named_one_is_refused() -> None:
    with pytest.raises(CurriculumError, match=f"another curriculum page than {SECOND.digest()}"):
        Curriculum(lambda digest: FIRST).rates(SECOND.digest())
    with pytest.raises(CurriculumError, match="only the run's coordinator has"):
        Curriculum().rates(FIRST.digest())


@pytest.mark.parametrize("rows", [[(2, 1, 0), (1, 1, 0)], [(1, 1, 0), (1, 1, 0)], [(1, 1, MILLION + 1)], [(-1, 1, 0)]])
def test_impossible_pages_are_refused(rows: list[tuple[int, int, int]]) -> None:
    with pytest.raises(ValueError, match="CurriculumPage"):
        CurriculumPage(step=1, tasks=rows)


def test_the_page_of_an_assignment_decides_its_plan() -> None:
    config = parse({"tasks": {"curriculum": "pass_rate"}, "sampling": {"group_size": 2}})
    task_set = tasks.load(config.tasks)
    plain = assignment(5, step=3).model_copy(update={"groups": 50})

    def planned(digest: str) -> list[int]:
        asked = plain.model_copy(update={"curriculum": digest})
        curriculum = Curriculum(BY_DIGEST.__getitem__)
        return [plan.task_index for plan in plan_submission(config, "run-0", asked, "cd" * 32, task_set, curriculum)]

    first, second, none = planned(FIRST.digest()), planned(SECOND.digest()), planned("")
    assert first == planned(FIRST.digest())
    assert first != second and first != none, "another page is another plan"
