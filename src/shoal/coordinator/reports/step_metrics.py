"""What the groups accepted during a step say of rewards, sources and lengths: the coordinator's part of `metrics.jsonl`.

Invariant: all accepted groups count, also those that the learner never saw. A figure that is unknown is left out. Names
are those of docs/metrics.md. Called by `learning`.
"""

from collections.abc import Iterator

from shoal.coordinator.state.database import Database
from shoal.coordinator.tables.grades import Scored


def judged(db: Database, step: int) -> dict[str, float]:
    """Nothing if groups left over from the step before filled this one at once."""
    rewards = db.groups.rewards_during(step)
    if rewards is None:
        return {}
    sources, targets = db.grades.by_source(step), db.grades.by_target(step)
    found = {"reward/mean": rewards[0], "reward/zero_std_frac": rewards[1]}
    if sources:
        rollouts = sum(one.rollouts for one in sources.values())
        found["score/mean"] = sum(one.score_mean * one.rollouts for one in sources.values()) / rollouts
    for source, scored in sources.items():
        found |= dict(_of_source(source, scored))
    found |= {f"part/{source}/{reward}": mean for (source, reward), mean in db.grades.by_part(step).items()}
    for target, scored in targets.items():
        if target:
            found |= dict(_of_target(target, scored))
    if any(targets):
        lost = sum(one.score_mean * one.rollouts - one.reward for one in targets.values())
        found["length_penalty/mean"] = lost / sum(one.rollouts for one in targets.values())
    return found


def _of_source(source: str, scored: Scored) -> Iterator[tuple[str, float]]:
    yield f"reward/{source}/mean", scored.reward_mean
    yield f"score/{source}/mean", scored.score_mean
    yield f"outcome/{source}/wrong_format", scored.wrong_format / scored.rollouts
    yield f"outcome/{source}/grader_error", scored.grader_error / scored.rollouts
    yield f"filtered/{source}", float(scored.filtered)
    yield f"filtered/{source}/all_right", float(scored.all_right)
    yield f"filtered/{source}/all_wrong", float(scored.all_wrong)


def _of_target(target: int, scored: Scored) -> Iterator[tuple[str, float]]:
    yield f"length/{target}/mean", scored.length_mean
    yield f"length/{target}/reward", scored.reward_mean
    yield f"length/{target}/score", scored.score_mean
    yield f"length/{target}/penalty", scored.score_mean - scored.reward_mean
