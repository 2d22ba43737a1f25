"""From decided descriptors to Envoy's response: the status of each, and headers for the client."""

from __future__ import annotations

from collections.abc import Sequence

from headgate.decision import Decision, decision
from headgate.service.envoy_limits import EnvoyRule
from headgate.service.envoy_plan import DescriptorCheck
from headgate.service.rls_messages import MAX_UINT32, OK, OVER_LIMIT, DescriptorStatus, RateLimitResponse

NO_LIMIT = DescriptorStatus(OK)
UNLIMITED = DescriptorStatus(OK, None, MAX_UINT32)
SECOND = 1_000_000  # microseconds

Answered = DescriptorCheck | DescriptorStatus


def decided(check: DescriptorCheck) -> Decision:
    """The decision about a check; a rule that lets nothing pass has no limiter that would make one."""
    return decision(False, 0, 0, SECOND, SECOND) if check.made is None else check.made


def status(rule: EnvoyRule, made: Decision, refused: bool, now: int) -> DescriptorStatus:
    """The status of one descriptor; *now* is in microseconds since the epoch."""
    remaining = made.remaining
    if refused and rule.shadow:
        remaining = 0
    elif rule.extra and not refused:
        remaining = min(remaining + rule.extra, MAX_UINT32)
    if rule.window:
        reset = rule.window - now % rule.window
    else:
        reset = made.retry_us if refused else made.reset_us
    code = OVER_LIMIT if refused and not rule.shadow else OK
    return DescriptorStatus(code, rule.limit, remaining, -(-reset // SECOND))


def respond(answers: Sequence[Answered], allowed: bool, now: int, with_headers: bool) -> RateLimitResponse:
    """The response; *answers* are decided checks, and statuses that needed no check."""
    statuses: list[DescriptorStatus] = []
    for one in answers:
        if isinstance(one, DescriptorCheck):
            one = status(one.rule, decided(one), one.refused, now)
        statuses.append(one)
    headers = _headers(answers, statuses, allowed) if with_headers else []
    return RateLimitResponse(OK if allowed else OVER_LIMIT, statuses, headers)


def _headers(answers: Sequence[Answered], statuses: Sequence[DescriptorStatus], allowed: bool) -> list[tuple[str, str]]:
    """RateLimit-* of the tightest limit, under the names of envoyproxy/ratelimit, and when to come back."""
    pairs = [(one, found) for one, found in zip(answers, statuses, strict=True) if isinstance(one, DescriptorCheck)]
    if not pairs:
        return []
    over = [(one, found) for one, found in pairs if found.code == OVER_LIMIT]
    _, tightest = min(over or pairs, key=lambda pair: pair[1].remaining)
    assert tightest.limit is not None
    headers = [
        ("RateLimit-Limit", str(tightest.limit[1])),
        ("RateLimit-Remaining", str(tightest.remaining)),
        ("RateLimit-Reset", str(_seconds(tightest))),
    ]
    if not allowed:
        waits = [_seconds(found) for one, found in over if not one.rule.quota]
        # Rules in quota_mode refuse a call only together, so the client may come back when the first of them recovers.
        quotas = [_seconds(found) for one, found in over if one.rule.quota]
        headers.append(("Retry-After", str(max([1, *waits, *([min(quotas)] if quotas else [])]))))
    return headers


def _seconds(found: DescriptorStatus) -> int:
    return int(found.reset_seconds or 0)
