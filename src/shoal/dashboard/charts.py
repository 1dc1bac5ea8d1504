"""Which charts a report has. Called by the report, which draws each in the page (`drawing`) and as a PNG (`pictures`)."""

from collections.abc import Iterator

from shoal.dashboard.curves import curves, flow
from shoal.dashboard.drawing import Bars, Chart, Line
from shoal.dashboard.queries import Queries
from shoal.dashboard.words import is_hard
from shoal.protocol.history import RunHistory
from shoal.watch.summary import smoothed


def charts(history: RunHistory, queries: Queries, limit: int) -> Iterator[Chart]:
    """`limit`: the oldest that a rollout may be, in versions."""
    found = curves(history.metrics)
    x, values = found["x"], found["values"]
    reward = values.get("reward", [])
    known = [value for value in reward if value is not None]
    lines = [Line("reward per step", x, reward, "accent thin")] if reward else []
    if len(known) == len(reward) > 4:
        lines.append(Line("smoothed", x, smoothed(known), "accent"))
    for kind, look in (("greedy", "ink"), ("sampled", "ring")):
        dots = [(e.version, getattr(e, kind)) for e in history.evaluations if getattr(e, kind) is not None]
        lines.append(Line(f"held-out, {kind}", [a for a, _ in dots], [b for _, b in dots], look, dots=True))
    yield Chart("reward", "Reward and held-out accuracy", lines)
    yield Chart("entropy", "Entropy", [Line("", x, values.get("entropy", []), "accent")] if "entropy" in values else [])
    kls = (("mismatch", "to the sampling policy", "accent"), ("kl", "to the reference", "soft-line"))
    yield Chart("kl", "KL", [Line(name, x, values[key], look) for key, name, look in kls if key in values])
    clips = (("clip_low", "low", "accent"), ("clip_high", "high", "soft-line"))
    clipped = [Line(name, x, values[key], look) for key, name, look in clips if key in values]
    yield Chart("clipped", "Clipped tokens, share", clipped)
    ages = (("stale_mean", "mean", "accent"), ("stale_max", "oldest", "soft-line"))
    age_lines = [Line(name, x, values[key], look) for key, name, look in ages if key in values]
    yield Chart("age", "Age of rollouts in versions", age_lines, least=limit)
    judged = flow(queries)
    groups = (("useful", "mist"), ("filtered", "idle"), ("stale", "warn"), ("late", "soft-line"), ("rejected", "bad"))
    bars = [Bars(n, judged["groups"][n], c) for n, c in groups]
    yield Chart("groups", "Groups by what became of them", x=judged["x"], bars=bars)
    verdicts = [Bars(r or "accepted", v, _look(r)) for r, v in sorted(judged["verdicts"].items())]
    yield Chart("verdicts", "Verdicts on submissions", x=judged["x"], bars=verdicts)
    speed = [Line("", x, values["tokens_per_s"], "accent")] if "tokens_per_s" in values else []
    yield Chart("speed", "Tokens trained per second", speed)


def _look(reason: str) -> str:
    return ("bad" if is_hard(reason) else "warn") if reason else "mist"
