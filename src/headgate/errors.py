"""What can go wrong, as one tree.

    HeadgateError
    ├── InvalidQuota        (ValueError)  the quota does not parse, or does not fit the algorithm
    ├── InvalidKey          (ValueError)  the key is empty, too long or has control characters
    ├── InvalidPermits      (ValueError)  permits is not a whole number of at least 1
    │   └── PermitsExceedLimit            more than the capacity: waiting would never help
    ├── RateLimited                       the time to wait ran out; ``.decision`` says when to come back
    └── StoreUnavailable                  the store did not answer and the policy is ``raise``

A denial is not an error: ``try_acquire`` returns it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headgate.decision import Decision


class HeadgateError(Exception):
    """The root of every error that headgate raises on purpose."""


class InvalidQuota(HeadgateError, ValueError):
    """The quota does not parse, is out of range, or does not fit the algorithm."""


class InvalidKey(HeadgateError, ValueError):
    """The key is not text, or is empty, longer than 256 bytes, or has control characters."""


class InvalidPermits(HeadgateError, ValueError):
    """``permits`` is not a whole number of at least 1 (0 is fine for ``peek``)."""


class PermitsExceedLimit(InvalidPermits):
    """More permits than the capacity: no wait would ever be long enough."""


class RateLimited(HeadgateError):
    """The permits did not come in time; ``decision`` is the refusal, with its ``retry_after``."""

    def __init__(self, key: str, decision: Decision) -> None:
        super().__init__(key, decision)
        self.key = key
        self.decision = decision

    def __str__(self) -> str:
        d = self.decision
        return f"{self.key!r} is over its limit of {d.limit}; retry in {d.retry_after:.3f} s"


class StoreUnavailable(HeadgateError):
    """The store did not answer. Raised only where ``on_store_error="raise"`` asks for it."""
