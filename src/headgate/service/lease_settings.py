"""What a rule may say of leases (`hybrid`) and of slots (`concurrency`), and which fields and stores fit them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

from headgate.algorithms import ALGORITHMS
from headgate.hybrid.protocol import LONGEST_SYNC, SHORTEST_SYNC, quota_params
from headgate.rule import Rule
from headgate.stores.base import SCHEMES, scheme_of

if TYPE_CHECKING:
    from headgate.service.settings import RuleSettings, Settings

AccuracyName = Literal["high", "medium", "low"]
Accuracy = AccuracyName | Annotated[float, Meta(ge=SHORTEST_SYNC, le=LONGEST_SYNC)]


class HybridSettings(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """How a rule uses leases. `hybrid = true` is the same with the defaults."""

    accuracy: Annotated[
        Accuracy,
        Meta(
            description="high, medium (5 s), low (30 s), or seconds between two reports: fewer trips, slower to follow"
        ),
    ] = "high"


def accuracy_of(hybrid: bool | HybridSettings) -> Accuracy | None:
    """The accuracy of a rule's leases; None for a rule that is not hybrid."""
    if isinstance(hybrid, HybridSettings):
        return hybrid.accuracy
    return "high" if hybrid else None


def _can_lease(kind: str) -> bool:
    try:
        quota_params(Rule("1/second", kind))
    except ValueError:
        return False
    return True


LEASED = tuple(kind for kind in ALGORITHMS if _can_lease(kind))  # the algorithms that leases can serve


def rule_refusal(rule: Rule) -> str:
    """Why leases cannot serve *rule*, and what would be right; nothing if they can."""
    if rule.kind not in LEASED:
        return f"leases cannot serve {rule.kind}; use one of {', '.join(LEASED)}, or leave hybrid out"
    if len(rule.quotas) > 1:
        return f"a hybrid rule takes one quota, got {len(rule.quotas)}; give one, or leave hybrid out"
    return ""


def store_refusal(url: str) -> str:
    """Why the store at *url* keeps no leases, and what would be right; nothing if it does, or is not known."""
    scheme = scheme_of(url)
    try:
        store = SCHEMES[scheme].load() if scheme in SCHEMES else None
        if store is None or (hasattr(store, "leases") and not getattr(store, "in_process", False)):
            return ""
    except ImportError:  # the error for a store whose package is missing comes later
        return ""
    return (
        f"leases save round trips to a server, and the store is {scheme}; leave hybrid out, "
        "or set store to redis://host:port/db, redis+sentinel://..., redis+cluster://... or postgresql://..."
    )


MAX_CONCURRENCY = 100_000
DEFAULT_LEASE = 30  # seconds
EXAMPLE = "[rules.uploads] with concurrency = 20"

Concurrency = Annotated[
    int, Meta(ge=1, le=MAX_CONCURRENCY, description="slots that clients may hold at once, instead of quotas")
]
LeaseSeconds = Annotated[
    int,
    Meta(ge=1, le=86_400, description="seconds after which a slot that is not renewed comes free; 30 if left out"),
]

SettingProblem = tuple[tuple[str, ...], str]  # the field, from the rule on, and what would be right


def concurrency_problems(name: str, rule: RuleSettings) -> Iterator[SettingProblem]:
    """What is wrong about the fields of *rule*, as far as concurrency is concerned."""
    if rule.concurrency is None:
        if rule.lease is not None:
            yield ("lease",), "only a rule with concurrency has a lease; add concurrency = 20, or leave lease out"
        for key, override in rule.overrides.items():
            if isinstance(override, int):
                yield ("overrides", key), f"{override} is no quota; write one such as '100/minute', or a plan's name"
        return
    if name == "default":
        why = f"the default rule is for checks and has quotas; write a rule of its own: {EXAMPLE}"
        yield ("concurrency",), why
    if rule.quotas is not None:
        why = "a rule has quotas or concurrency; write two rules: check the one, and acquire from the other"
        yield ("quotas",), why
    if rule.algorithm.lower() != "token_bucket":
        yield ("algorithm",), "an algorithm is for quotas; leave it out of a rule with concurrency"
    if rule.hybrid:
        yield ("hybrid",), "hybrid is for quotas; leave it out of a rule with concurrency"
    if rule.cost != 1:
        yield ("cost",), "a cost is for quotas; leave it out: an acquire says how many slots it takes, with permits="
    for key, override in rule.overrides.items():
        if not isinstance(override, int):
            why = "the override of a rule with concurrency is a number of slots, for example 50"
            yield ("overrides", key), f"{why}, got {override!r:.40}"


def concurrency_store_refusal(settings: Settings) -> str:
    """Why the store cannot keep slots for all workers, and what would be right; nothing if it can, or is not known."""
    scheme = scheme_of(settings.store)
    try:
        if scheme not in SCHEMES:
            return ""
        keeps = hasattr(SCHEMES[scheme].load(), "states")
    except ImportError:  # the error for a store whose package is missing comes later
        return ""
    redis = "set store to redis://host:port/db, redis+sentinel://... or redis+cluster://..."
    if not keeps:
        return f"the store {scheme} keeps no slots; {redis}, or use memory:// with one worker"
    if scheme == "memory://" and settings.workers > 1:
        return f"{settings.workers} workers cannot share slots in memory; {redis}, or use one worker"
    return ""
