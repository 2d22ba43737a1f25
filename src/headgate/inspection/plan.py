"""What new settings change for clients: which rules become tighter or looser, count by another key, come or go.

Quotas are compared by what they admit: in any stretch of d seconds at most capacity + rate * d, the least of all quotas
of a rule. One set is tighter than another if it admits at most as much in every stretch, and less in some.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple

from headgate.quota import Quota
from headgate.rule import Rule
from headgate.service.settings import RuleSettings, Settings, quota_overrides, quotas_for, resolve_plan

WORRYING = ("tighter", "mixed", "key changed", "removed")


class RuleChange(NamedTuple):
    """One thing that changes in a rule."""

    rule: str
    kind: str  # tighter, looser, mixed, key changed, algorithm changed, added, removed, changed
    field: str
    old: str
    new: str

    def as_dict(self) -> dict[str, str]:
        return self._asdict()

    def __str__(self) -> str:
        return f"{self.rule}: {self.kind}: {self.field}: {self.old or 'none'} -> {self.new or 'none'}"


def changes(old: Settings, new: Settings) -> list[RuleChange]:
    """All changes of rules, in the order of their names."""
    return [change for name in sorted({*old.rules, *new.rules}) for change in _of_rule(name, old, new)]


def worries(found: Sequence[RuleChange]) -> bool:
    """Whether a client may be refused that was not, or starts to count anew."""
    return any(change.kind in WORRYING for change in found)


def _of_rule(name: str, old: Settings, new: Settings) -> Iterator[RuleChange]:
    before, after = old.rules.get(name), new.rules.get(name)
    if before is None or after is None:
        kind = "added" if before is None else "removed"
        yield RuleChange(name, kind, "rule", _shown(name, before, old), _shown(name, after, new))
        return
    if before.key != after.key:
        yield RuleChange(name, "key changed", "key", " + ".join(before.key), " + ".join(after.key))
    if before.algorithm.lower() != after.algorithm.lower():
        yield RuleChange(name, "algorithm changed", "algorithm", before.algorithm.lower(), after.algorithm.lower())
    if before.concurrency != after.concurrency:
        kind = _compare_numbers(before.concurrency, after.concurrency)
        yield RuleChange(name, kind, "concurrency", str(before.concurrency or ""), str(after.concurrency or ""))
    elif before.concurrency is None:
        yield from _quotas(name, "quotas", _admits(name, before, old), _admits(name, after, new))
        keys = {**quota_overrides(before), **quota_overrides(after)}
        for key in keys:
            field = f"overrides.{key}"
            yield from _quotas(name, field, _admits(name, before, old, key), _admits(name, after, new, key))
    if before.cost != after.cost:
        kind = "tighter" if after.cost > before.cost else "looser"
        yield RuleChange(name, kind, "cost", str(before.cost), str(after.cost))
    if before.shadow != after.shadow:
        kind = "looser" if after.shadow else "tighter"
        yield RuleChange(name, kind, "shadow", str(before.shadow).lower(), str(after.shadow).lower())
    if set(before.exempt) != set(after.exempt):
        gone, come = set(before.exempt) - set(after.exempt), set(after.exempt) - set(before.exempt)
        kind = "mixed" if gone and come else "tighter" if gone else "looser"
        yield RuleChange(name, kind, "exempt", ", ".join(before.exempt), ", ".join(after.exempt))
    for field in ("on_store_error", "hybrid", "lease"):
        one, other = getattr(before, field), getattr(after, field)
        if one != other:
            yield RuleChange(name, "changed", field, str(one), str(other))


def _quotas(name: str, field: str, old: Sequence[Quota], new: Sequence[Quota]) -> Iterator[RuleChange]:
    kind = compare_quotas(old, new)
    if kind != "same":
        yield RuleChange(name, kind, field, ", ".join(map(str, old)), ", ".join(map(str, new)))


def _admits(name: str, rule: RuleSettings, settings: Settings, key: str = "") -> list[Quota]:
    """The quotas that hold for *key* under a rule."""
    kind = rule.algorithm.lower()
    quotas = quota_overrides(rule).get(key)
    given = quotas_for(name, rule, kind) if quotas is None else resolve_plan(quotas, settings.plans)
    return Rule(given, kind).quotas


def _shown(name: str, rule: RuleSettings | None, settings: Settings) -> str:
    if rule is None:
        return ""
    return f"{rule.concurrency} at once" if rule.concurrency else ", ".join(map(str, _admits(name, rule, settings)))


def compare_quotas(old: Sequence[Quota], new: Sequence[Quota]) -> str:
    """How *new* differs from *old*: same, tighter, looser, or mixed if that depends on how clients call."""
    lines = [(Fraction(quota.capacity), Fraction(quota.limit * 1_000_000, quota.period_us)) for quota in (*old, *new)]
    stretches = {Fraction(0)}  # where one quota takes over from another; between two of them all is linear
    for one in lines:
        for other in lines:
            if one[1] != other[1] and (crossing := (other[0] - one[0]) / (one[1] - other[1])) > 0:
                stretches.add(crossing)
    stretches.add(max(stretches) + 1)
    half = len(old)
    differences = {
        _sign(min(c + r * d for c, r in lines[half:]) - min(c + r * d for c, r in lines[:half])) for d in stretches
    }
    slope = _sign(min(r for _, r in lines[half:]) - min(r for _, r in lines[:half]))
    differences = (differences | {slope}) - {0}
    return {(): "same", (-1,): "tighter", (1,): "looser"}.get(tuple(differences), "mixed")


def _compare_numbers(old: int | None, new: int | None) -> str:
    if old is None or new is None:
        return "mixed"  # slots in place of quotas, or the other way round
    return "tighter" if new < old else "looser"


def _sign(number: Fraction) -> int:
    return (number > 0) - (number < 0)
