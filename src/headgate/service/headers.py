"""`RateLimit-Policy` and `RateLimit` as drafts 08 to 11 of draft-ietf-httpapi-ratelimit-headers define them.

The draft may still change, so these fields are off unless the operator turns them on.
"""

from __future__ import annotations

from collections.abc import Sequence

from headgate.quota import Quota


def policy_names(rule: str, quotas: Sequence[Quota]) -> list[str]:
    """A name for each quota of *rule*; a rule's name needs no escapes."""
    return [rule] if len(quotas) == 1 else [f"{rule}.{i + 1}" for i in range(len(quotas))]


def policy_header(rule: str, quotas: Sequence[Quota]) -> tuple[str, str]:
    """The quotas of *rule*. A window is at least 1 whole second."""
    items = [
        f'"{name}";q={quota.limit};w={max(1, -(-quota.period_us // 1_000_000))}'
        for name, quota in zip(policy_names(rule, quotas), quotas, strict=True)
    ]
    return "ratelimit-policy", ", ".join(items)


def limit_header(policy_name: str, remaining: int, reset: int) -> tuple[str, str]:
    """What remains of the quota called *policy_name*; *reset* is in whole seconds from now."""
    return "ratelimit", f'"{policy_name}";r={remaining};t={reset}'
