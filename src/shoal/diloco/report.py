"""What the log says of a round. Called by `serve`."""

from shoal.diloco.messages import SILENT, Figures, MeetingStatus, Outcome


def summary(outcome: Outcome, status: MeetingStatus) -> str:
    """One line about a round that ended: who counted, with what loss, and how each spent its time."""
    told = [f"{name} {_told(status.sites[name].figures or SILENT)}" for name in outcome.kept]
    told += [f"{name} left out" for name in outcome.left_out] + [f"{name} missing" for name in outcome.missing]
    return f"round {outcome.round + 1} of {status.rounds}: " + "; ".join(told)


def _told(figures: Figures) -> str:
    total_s = figures.computed_s + figures.waited_s + figures.synced_s or 1.0
    shares = [
        f"{100 * seconds / total_s:.0f} % {what}"
        for what, seconds in (
            ("computing", figures.computed_s),
            ("waiting for data", figures.waited_s),
            ("for sites", figures.synced_s),
        )
    ]
    return (f"loss {figures.loss:.4g}, " if figures.loss is not None else "") + ", ".join(shares)
