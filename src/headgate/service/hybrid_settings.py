"""What the settings say about hybrid rules, and which rules and stores leases can serve."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from headgate.algorithms import ALGORITHMS
from headgate.hybrid.protocol import quota_params
from headgate.rule import Rule
from headgate.stores.base import SCHEMES, scheme_of

Accuracy = Literal["high", "medium", "low"]


class HybridSettings(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """How a rule uses leases. `hybrid = true` is the same with the defaults."""

    accuracy: Annotated[
        Accuracy,
        Meta(description="lower: fewer round trips, and more of the limit may be on lease elsewhere"),
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
        if scheme not in SCHEMES or hasattr(SCHEMES[scheme].load(), "leases"):
            return ""
    except ImportError:  # the error for a store whose package is missing comes later
        return ""
    return (
        f"a hybrid rule leases permits from a Redis, and the store is {scheme}; leave hybrid out, "
        "or set store to redis://host:port/db, redis+sentinel://... or redis+cluster://..."
    )
