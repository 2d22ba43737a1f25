"""`RateLimit-Policy` and `RateLimit` as drafts 08 to 11 of draft-ietf-httpapi-ratelimit-headers have them.

A draft, and it may still change; so these fields are off unless the operator asks for them.
"""

from __future__ import annotations

from collections.abc import Sequence

from headgate.quota import Quota
from headgate.service.http import Headers


def policy_header(name: str, quotas: Sequence[Quota]) -> tuple[str, str]:
    """What is enforced. A window is whole seconds there, at least 1; *name* is a rule's, so it needs no escapes."""
    items = []
    for i, quota in enumerate(quotas):
        label = name if len(quotas) == 1 else f"{name}.{i + 1}"
        items.append(f'"{label}";q={quota.limit};w={max(1, -(-quota.period_us // 1_000_000))}')
    return "ratelimit-policy", ", ".join(items)


def limit_headers(name: str, policy: tuple[str, str], remaining: int, reset: int) -> Headers:
    """How things stand; *reset* in whole seconds from now."""
    return [policy, ("ratelimit", f'"{name}";r={remaining};t={reset}')]
