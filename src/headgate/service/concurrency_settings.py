"""What the settings say about rules that limit concurrency, and which fields and stores they can be used with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from headgate.stores.base import SCHEMES, scheme_of

if TYPE_CHECKING:
    from headgate.service.settings import RuleSettings, Settings

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
