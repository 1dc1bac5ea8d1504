"""Who contributed what: by node, and by step.

Invariant: every figure is counted from files that passed the audit, none is a report. Called by `audit`.
"""

from collections import Counter

from shoal.cli.audit.found import Found


def by_node(found: Found) -> list[str]:
    """A line for each worker, and one for each validator."""
    lines = [f"{'node':20} {'accepted':>8} {'rejected':>8} {'tokens':>10} {'credited':>10} {'trained groups':>14}"]
    trained = Counter(found.accepted[id].worker for batch in found.batches[: len(found.records)] for id, _ in batch)
    rejected = Counter(one.worker for one in found.rejected.values())
    for key, name in sorted(found.names.items(), key=lambda item: item[1]):
        mine = [one for one in found.accepted.values() if one.worker == key]
        if found.roles[key] == "worker":
            credited = sum(one.tokens for one in mine if found.credit.get(one.id) == "credited")
            tokens = sum(one.tokens for one in mine)
            figures = f"{len(mine):8} {rejected[key]:8} {tokens:10,} {credited:10,} {trained[key]:14,}"
            lines.append(f"{name:20} {figures}" + ("  slashed" if key in found.slashed else ""))
        if found.roles[key] == "validator":
            judged = [one for one in found.accepted.values() if one.validator == key]
            lines.append(f"{name:20} {len(judged):8} accepted by it, {sum(one.full for one in judged)} prefilled whole")
    return lines


def by_step(found: Found) -> list[str]:
    """A line for each trained step: groups and tokens of each worker."""
    lines = []
    for step, _ in enumerate(found.records):
        groups: Counter[str] = Counter()
        tokens: Counter[str] = Counter()
        for id, group in found.batches[step]:
            one = found.accepted[id]
            groups[found.names[one.worker]] += 1
            tokens[found.names[one.worker]] += one.group_tokens[group]
        parts = [f"{name} {groups[name]} groups, {tokens[name]:,} tokens" for name in sorted(groups)]
        lines.append(f"step {step}: {'; '.join(parts)}")
    return lines
