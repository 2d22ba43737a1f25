"""A limiter's calls as the command HEADGATE.LIMIT, which carries the rule: the service needs to know no limiter before.

HEADGATE.LIMIT take|peek|refund|charge|reset RULE key permits
HEADGATE.LIMIT take RULE key permits share
HEADGATE.LIMIT book|cancel RULE key permits id within grace
HEADGATE.LIMIT all RULE key permits [RULE key permits ...]
HEADGATE.LIMIT ready

RULE is a text, ``algorithm|quotas|name``, such as ``token_bucket|100/minute,1000/hour|login``. Each rule has one such
text, so a service recognises a rule by its bytes alone. Take, peek and all are answered with `REPLY_SIZE` integers for
each check: allowed (1 or 0), limit, remaining, microseconds until the key is as good as new, microseconds after which
a retry succeeds. The others are answered with OK.

*share* is what a call leaves, in millionths of the capacity. A booking, whose times are microseconds, is answered with
nine integers: 0 denied, 1 booked or 2 known; when the slot is and the service's time, in microseconds since the epoch;
its permits; and the five of how the quotas stand. To cancel is answered with one: whether the permits are given back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from headgate.algorithms.booking import BOOKED, Booked, Booking
from headgate.decision import Decision, decision
from headgate.keys import digest
from headgate.redis.script import REPLY_SIZE, pack, pack_arguments, pack_permits
from headgate.rule import Rule, check_permits
from headgate.stores.remote import LimiterCall, share_of
from headgate.stores.remote_joint import JointCall

COMMAND = "HEADGATE.LIMIT"
READY = pack(COMMAND, "ready")  # answered with OK if the store of the service answers
OPERATIONS = ("take", "peek", "refund", "charge", "reset")
MAX_CHECKS = 20  # of several limiters in one command; a command has at most 64 words
MAX_QUOTAS = 32  # of one rule
UNSURE = "UNSURE"  # how the error begins of a call that the store of the service may have made or not
UNFIT = "UNFIT"  # and of one that a service with this store, or with leases, cannot make


def rule_text(rule: Rule) -> str:
    """The text of *rule*, which `parse_rule` reads."""
    return f"{rule.state_kind}|{','.join(str(quota) for quota in rule.quotas)}|{rule.name}"


def parse_rule(text: str) -> Rule:
    """The rule of a text, which must be written as `rule_text` does. Raises ValueError."""
    kind, quotas, name = [*text.split("|", 2), "", ""][:3]
    parts = quotas.split(",")
    if len(parts) > MAX_QUOTAS:
        raise ValueError(f"a rule has at most {MAX_QUOTAS} quotas, got {len(parts)}")
    first = kind == "first_window"
    rule = Rule(parts, "fixed_window" if first else kind, name, "first" if first else "clock")
    if (canonical := rule_text(rule)) != text:
        raise ValueError(f"write the rule as {canonical!r:.200}, got {text!r:.200}")
    return rule


class LimiterCommands:
    """One limiter's calls as commands."""

    repeatable = False  # a second run would spend a second time
    mergeable = False  # each call is a command; a batch is a pipeline of them

    def __init__(self, rule: Rule, hash_keys: bool = False) -> None:
        self.name_of: Callable[[str], str] = digest if hash_keys else str
        self.capacity = rule.capacity
        self.quota_count = len(rule.parts)
        if self.quota_count > MAX_QUOTAS:
            raise ValueError(f"a limiter on a service has at most {MAX_QUOTAS} quotas, got {self.quota_count}")
        self.label = rule.label
        self.packed_rule = pack_arguments(rule_text(rule))
        self._starts = {op: b"*5\r\n" + pack_arguments(COMMAND, op) + self.packed_rule for op in OPERATIONS}
        self._above = b"*6\r\n" + pack_arguments(COMMAND, "take") + self.packed_rule

    def slot(self, key: str) -> int:
        """A service has no slots."""
        return 0

    def command(self, calls: Sequence[LimiterCall], send_source: bool = False) -> bytes:
        """The command of one call."""
        [call] = calls
        key = self.name_of(call.key).encode()
        start, end = self._starts.get(call.op), b""
        if start is None:
            start, end = self._above, pack_arguments(share_of(call.op))
        return b"%b$%d\r\n%b\r\n%b%b" % (start, len(key), key, pack_permits(call.permits), end)

    def decision(self, reply: Any) -> Decision:
        allowed, limit, remaining, reset, retry = reply
        return decision(allowed == 1, limit, remaining, reset, retry)

    def refunds(self, call: LimiterCall, reply: Any) -> list[tuple[Any, LimiterCall]]:
        """The calls that give back what *call* took, by its *reply*."""
        return [(self, call._replace(op="refund"))] if call.op.startswith("take") and reply[0] == 1 else []


class BookingCommands:
    """The bookings of one limiter as commands, and its resets, which forget slots too."""

    repeatable = True  # a booking has an id, and a second one of that id takes nothing
    mergeable = False

    def __init__(self, limiter: LimiterCommands) -> None:
        self.quota_count = limiter.quota_count
        self._limiter = limiter

    def slot(self, key: str) -> int:
        """A service has no slots of a Cluster."""
        return 0

    def command(self, calls: Sequence[Booking], send_source: bool = False) -> bytes:
        """The command of one call."""
        [call] = calls
        if call.op == "reset":
            return self._limiter.command([LimiterCall("reset", call.key, 1)])
        key = self._limiter.name_of(call.key)
        words = pack_arguments(key, call.permits, call.id, call.within, call.grace)
        return b"*8\r\n" + pack_arguments(COMMAND, call.op) + self._limiter.packed_rule + words

    def booked(self, reply: Sequence[int], within: int) -> Booked:
        outcome, at, now, permits, *numbers = reply
        return Booked(outcome, at, now, permits, self._limiter.decision(numbers))

    def refunds(self, call: Booking, reply: Any) -> list[tuple[Any, Booking]]:
        """A booking whose caller is gone is cancelled."""
        return [(self, call._replace(op="cancel"))] if call.op == "book" and reply[0] == BOOKED else []


class JointCommands:
    """The checks of several limiters, in this order, as one command."""

    repeatable = False
    mergeable = False

    def __init__(self, limiters: Sequence[LimiterCommands]) -> None:
        self.limiters = limiters
        self.quota_count = sum(limiter.quota_count for limiter in limiters)
        if len(limiters) > MAX_CHECKS:
            raise ValueError(f"a service decides at most {MAX_CHECKS} checks in one step, got {len(limiters)}")
        self._start = b"*%d\r\n" % (2 + 3 * len(limiters)) + pack_arguments(COMMAND, "all")

    def check_totals(self, call: JointCall) -> None:
        """Raise if the checks that share a state ask for more of it than its capacity."""
        totals: Counter[tuple[object, str]] = Counter()
        for limiter, key, permits in zip(self.limiters, call.keys, call.permits, strict=True):
            totals[limiter.label, key] += permits
            check_permits(totals[limiter.label, key], limiter.capacity)

    def slot(self, key: str) -> int:
        """A service has no slots."""
        return 0

    def command(self, calls: Sequence[JointCall], send_source: bool = False) -> bytes:
        """The command of one call."""
        [call] = calls
        checks = zip(self.limiters, call.keys, call.permits, strict=True)
        parts = [(one.packed_rule, pack_arguments(one.name_of(key)), pack_permits(count)) for one, key, count in checks]
        return b"".join([self._start, *[word for part in parts for word in part]])

    def decisions(self, reply: Any) -> list[Decision]:
        """A decision for each check."""
        starts = range(0, len(reply), REPLY_SIZE)
        pairs = zip(self.limiters, starts, strict=True)
        return [limiter.decision(reply[at : at + REPLY_SIZE]) for limiter, at in pairs]

    def refunds(self, call: JointCall, reply: Any) -> list[tuple[Any, LimiterCall]]:
        """The calls that give back what *call* took, by its *reply*."""
        if not all(reply[::REPLY_SIZE]):
            return []
        checks = zip(self.limiters, call.keys, call.permits, strict=True)
        return [(limiter, LimiterCall("refund", key, permits)) for limiter, key, permits in checks]
