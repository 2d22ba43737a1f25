"""How the descriptors of one call are decided: plans (see `headgate._plan`) that ask the store for one step at a time.

All or nothing, the default: when a rule refuses the call, no rule counts it. A rule in shadow_mode refuses no call, and
rules in quota_mode refuse it only together; those that are over are left out, and the others count.

Each, as envoyproxy/ratelimit counts: every descriptor counts for itself.

A check of 0 hits looks: it is refused when nothing remains, and spends nothing.

A check that asks for more than remains is refused, and spends nothing; unless it drains: then what remains is taken. A
cost that becomes known after the work, such as the tokens of an answer, is charged when it cannot be refused any more.
If it were not taken at all, a client that looks first and charges later would find something left for ever.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from headgate.decision import Decision, decision

DRAIN_TRIES = 3  # another call may take from what remains in between


class LimitedRule(Protocol):
    """What a plan asks of a rule."""

    @property
    def capacity(self) -> int: ...  # 0: nothing ever passes, and there is nothing to count
    @property
    def counter(self) -> str: ...  # rules of one counter share their states
    @property
    def shadow(self) -> bool: ...
    @property
    def quota(self) -> bool: ...


class DescriptorCheck:
    """One descriptor that has a limit: what is asked, and what became of it."""

    __slots__ = ("drain", "hits", "key", "made", "refused", "rule")

    def __init__(self, rule: Any, key: str, hits: int, drain: bool) -> None:
        self.rule = rule
        self.key = key
        self.hits = hits
        self.drain = drain
        self.made: Decision | None = None
        self.refused = False


class StoreStep(NamedTuple):
    """What a plan asks for: take all or none, take each, or peek; a decision for each rule, key and permits."""

    what: Literal["all", "each", "peek"]
    asked: list[tuple[Any, str, int]]


Plan = Generator[StoreStep, list[Decision], bool]  # its result: whether the call is allowed


def all_or_nothing(checks: Sequence[DescriptorCheck]) -> Plan:
    """Decide *checks* together."""
    yield from _look(checks)
    _refuse_impossible(checks)
    spending = [check for check in checks if check.hits and not check.refused]
    while spending and not is_over(checks):
        made = yield StoreStep("all", [(check.rule, check.key, check.hits) for check in spending])
        for check, one in zip(spending, made, strict=True):
            check.made, check.refused = one, not one.allowed
        if all(made):
            break
        spending = [check for check in spending if not check.refused]
    yield from _see_refused(checks)
    return not is_over(checks)


def each_for_itself(checks: Sequence[DescriptorCheck]) -> Plan:
    """Decide each of *checks* as if there were no other."""
    yield from _look(checks)
    _refuse_impossible(checks, add_up=False)
    spending = [check for check in checks if check.hits and not check.refused]
    if spending:
        made = yield StoreStep("each", [(check.rule, check.key, check.hits) for check in spending])
        for check, one in zip(spending, made, strict=True):
            check.made, check.refused = one, not one.allowed
    yield from _see_refused(checks)
    return not is_over(checks)


def is_over(checks: Sequence[DescriptorCheck]) -> bool:
    """Whether the call is over a limit: a rule refuses it, or all rules in quota_mode do."""
    quotas = refused = 0
    for check in checks:
        over = check.refused and not check.rule.shadow
        if check.rule.quota:
            quotas += 1
            refused += over
        elif over:
            return True
    return quotas > 0 and quotas == refused


def _look(checks: Sequence[DescriptorCheck]) -> Generator[StoreStep, list[Decision], None]:
    """Decide the checks of 0 hits: one that would refuse a single hit is refused."""
    looks = [check for check in checks if not check.hits and check.rule.capacity]
    if not looks:
        return
    made = yield StoreStep("peek", [(check.rule, check.key, 1) for check in looks])
    for check, one in zip(looks, made, strict=True):
        check.refused = not one.allowed
        if one.allowed:  # as it is, without the hit that was not spent
            one = decision(True, one.limit, one.remaining + 1, one.reset_us, 0, one.degraded)
        check.made = one


def _refuse_impossible(checks: Sequence[DescriptorCheck], add_up: bool = True) -> None:
    """Refuse checks of more hits than the capacity, for which a limiter would raise `PermitsExceedLimit`.

    *add_up*: the hits of checks with one counter and key are counted together.
    """
    asked: dict[tuple[str, str], int] = {}
    for check in checks if add_up and len(checks) > 1 else ():
        counter = check.rule.counter, check.key
        asked[counter] = asked.get(counter, 0) + check.hits
    for check in checks:
        total = asked.get((check.rule.counter, check.key), check.hits)
        if total > check.rule.capacity or not check.rule.capacity:
            check.refused = True


def _see_refused(checks: Sequence[DescriptorCheck]) -> Generator[StoreStep, list[Decision], None]:
    """Peek at the keys of checks that have no decision yet; then take what remains for refused checks that drain."""
    unseen = [check for check in checks if check.made is None and check.rule.capacity]
    if unseen:
        made = yield StoreStep("peek", [(check.rule, check.key, 0) for check in unseen])
        for check, one in zip(unseen, made, strict=True):
            check.made = _refusal(one) if check.refused else one
    draining = [check for check in checks if check.refused and check.drain and check.hits]
    for _ in range(DRAIN_TRIES):
        left = [check for check in draining if check.made is not None and check.made.remaining > 0]
        if not left:
            return
        made = yield StoreStep("each", [(check.rule, check.key, _remaining(check)) for check in left])
        for check, one in zip(left, made, strict=True):
            check.made = _refusal(one)


def _remaining(check: DescriptorCheck) -> int:
    assert check.made is not None
    return check.made.remaining


def _refusal(state: Decision) -> Decision:
    """A denial with the numbers of *state*; when its time is over the key is as good as new."""
    retry = max(state.retry_us, state.reset_us)
    return decision(False, state.limit, state.remaining, state.reset_us, retry, state.degraded)
