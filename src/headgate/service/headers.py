"""`RateLimit-Policy` and `RateLimit` as drafts 08 to 11 of draft-ietf-httpapi-ratelimit-headers define them.

The draft may still change, so these fields are off unless the operator turns them on.
"""

from __future__ import annotations

from collections.abc import Sequence

from headgate.quota import Quota


def policy_header(name: str, quotas: Sequence[Quota]) -> tuple[str, str]:
    """The quotas of rule *name*. A window is at least 1 whole second; a rule's name needs no escapes."""
    items = []
    for i, quota in enumerate(quotas):
        label = name if len(quotas) == 1 else f"{name}.{i + 1}"
        items.append(f'"{label}";q={quota.limit};w={max(1, -(-quota.period_us // 1_000_000))}')
    return "ratelimit-policy", ", ".join(items)


def limit_headers(name: str, policy: tuple[str, str], remaining: int, reset: int) -> list[tuple[str, str]]:
    """What remains of rule *name*; *reset* is in whole seconds from now."""
    return [policy, ("ratelimit", f'"{name}";r={remaining};t={reset}')]
