"""The checks that a client may send as JSON, and the answers; the handlers and the OpenAPI document share them."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from headgate.algorithms import ALGORITHMS
from headgate.keys import MAX_BYTES

BATCH = 1000

Key = Annotated[
    str,
    Meta(
        description=f"whose limit; 1 to {MAX_BYTES} bytes of UTF-8 without control characters. "
        "Without one it is the client's address",
        examples=["user:123"],
        min_length=1,
        max_length=MAX_BYTES,
        # only for the OpenAPI document: the limiter's own check has better errors
        extra_json_schema={"pattern": "^[^\\u0000-\\u001f\\u007f-\\u009f]+$"},
    ),
]
AlgorithmName = Annotated[
    str,
    Meta(
        description="in any case; the rule's own if left out",
        extra_json_schema={"enum": [name.upper() for name in ALGORITHMS]},
    ),
]
MAX_PERMITS = 1_000_000_000
# JSON has one type of number, so 5.0 is a whole number, too.
Permits = Annotated[int, Meta(ge=1, le=MAX_PERMITS)] | Annotated[float, Meta(ge=1, le=MAX_PERMITS, multiple_of=1)]
RuleName = Annotated[str, Meta(description="a rule of the file; `default` if left out", examples=["default"])]
LEASE_ID = "[!-~]{1,128}"
LeaseId = Annotated[
    str,
    Meta(
        description="names one piece of work: 1 to 128 printable ASCII characters without spaces",
        examples=["job-4711"],
        extra_json_schema={"pattern": f"^{LEASE_ID}$"},  # not `pattern`: the handler's error says what would be right
    ),
]
Wait = Annotated[
    float, Meta(ge=0, description="seconds that the answer may be held until the permits are there", examples=[2])
]


class Check(msgspec.Struct, forbid_unknown_fields=True):
    """One check. A field that is null counts as left out: many clients write all of their fields."""

    key: Key | None = None
    algorithm: AlgorithmName | None = None
    permits: Permits | None = None
    rule: RuleName | None = None


class WaitingCheck(Check):
    """One check that may wait."""

    wait: Wait | None = None


Checks = Annotated[list[Check], Meta(max_length=BATCH)]


class Answer(msgspec.Struct):
    """The decision about a check."""

    allowed: bool
    key: str
    algorithm: str
    limit: Annotated[int, Meta(description="the capacity")]
    remaining: Annotated[int, Meta(ge=0)]
    resetAfterSeconds: Annotated[int, Meta(ge=0, description="until the key is as good as never seen")]  # noqa: N815
    retryAfterSeconds: Annotated[int, Meta(ge=0, description="0 when allowed, else at least 1")]  # noqa: N815
    message: str
    rule: Annotated[str, Meta(description="when it is not `default`")] | msgspec.UnsetType = msgspec.UNSET
    degraded: (
        Annotated[bool, Meta(description="true when the store was down and the policy answered")] | msgspec.UnsetType
    ) = msgspec.UNSET
    shadow: (
        Annotated[bool, Meta(description="true when the rule would have denied, were it in force")] | msgspec.UnsetType
    ) = msgspec.UNSET
    unanswered: (
        Annotated[bool, Meta(description="true in a batch, when the store was down and on_store_error is `raise`")]
        | msgspec.UnsetType
    ) = msgspec.UNSET
    exempt: Annotated[bool, Meta(description="true when the client is exempt")] | msgspec.UnsetType = msgspec.UNSET


class SlotRequest(msgspec.Struct, forbid_unknown_fields=True):
    """An acquire. Without a lease the service makes one up."""

    rule: Annotated[str, Meta(description="a rule of the file with `concurrency`")] | None = None
    key: Key | None = None
    lease: LeaseId | None = None
    permits: Permits | None = None


class SlotLease(msgspec.Struct, forbid_unknown_fields=True):
    """A renewal or a release: the lease of an acquire, under the same rule and key."""

    rule: Annotated[str, Meta(description="a rule of the file with `concurrency`")] | None = None
    key: Key | None = None
    lease: LeaseId | None = None


class SlotAnswer(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Whether a slot was taken, and how many there are."""

    allowed: bool
    key: str
    limit: Annotated[int, Meta(description="slots that may be in use at once")]
    remaining: Annotated[int, Meta(ge=0, description="slots that are free")]
    inUse: Annotated[int, Meta(ge=0, description="left out when the store did not answer")] | None = None  # noqa: N815
    lease: Annotated[str, Meta(description="to renew and to release it by, when one was taken")] | None = None
    expiresInSeconds: Annotated[int, Meta(ge=1, description="unless it is renewed")] | None = None  # noqa: N815
    retryAfterSeconds: Annotated[  # noqa: N815
        int, Meta(ge=0, description="0 when allowed, else until the first lease ends, if it is not renewed")
    ]
    message: str
    rule: str
    degraded: Annotated[bool, Meta(description="true when the store was down and the policy answered")] = False
    shadow: Annotated[bool, Meta(description="true when the rule would have denied, were it in force")] = False
    exempt: Annotated[bool, Meta(description="true when the client is exempt")] = False


class LeaseAnswer(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What became of a lease: a renewal has `renewed`, a release `released`."""

    renewed: bool | None = None
    released: Annotated[bool, Meta(description="false: it had ended, or never was")] | None = None
    key: str
    lease: str
    expiresInSeconds: Annotated[int, Meta(ge=1, description="after a renewal")] | None = None  # noqa: N815
    message: str
    rule: str
    degraded: Annotated[bool, Meta(description="true when the store was down and the policy answered")] = False
    shadow: Annotated[bool, Meta(description="true when there is no such lease, under a shadow rule")] = False
    exempt: Annotated[bool, Meta(description="true when the client is exempt")] = False


Seconds = Annotated[float, Meta(ge=0)]
SlotId = Annotated[
    str,
    Meta(
        description="names one piece of work, which gets its slot again when it asks again; 1 to 256 bytes of UTF-8",
        examples=["job-4711"],
        min_length=1,
        max_length=MAX_BYTES,
        extra_json_schema={"pattern": "^[^\\u0000-\\u001f\\u007f-\\u009f]+$"},  # as of a key
    ),
]


class BookingRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A booking. Without an id the service makes one up."""

    rule: RuleName | None = None
    key: Key | None = None
    algorithm: AlgorithmName | None = None
    id: SlotId | None = None
    permits: Permits | None = None
    within: Annotated[Seconds, Meta(description="the latest slot, in seconds from now; 900 if left out")] | None = None
    grace: Annotated[Seconds, Meta(description="seconds that the slot holds; 10 if left out")] | None = None


class BookingAnswer(msgspec.Struct, kw_only=True, omit_defaults=True):
    """When the work may start; or, with nothing taken, that it would be too late."""

    allowed: bool
    key: str
    algorithm: str
    limit: Annotated[int, Meta(description="the capacity")]
    id: Annotated[str, Meta(description="to ask again by, and to cancel")] | None = None
    delaySeconds: Annotated[float, Meta(ge=0, description="0 if it may start now")] | None = None  # noqa: N815
    at: Annotated[float, Meta(description="the same as seconds since the epoch, by the store's clock")] | None = None
    again: Annotated[bool, Meta(description="true when the id had this slot already")] = False
    retryAfterSeconds: Annotated[int, Meta(ge=0, description="0 when allowed, else at least 1")]  # noqa: N815
    message: str
    rule: str
    degraded: Annotated[bool, Meta(description="true when the store was down and the policy answered")] = False
    shadow: Annotated[bool, Meta(description="true when the rule would have delayed it, were it in force")] = False
    exempt: Annotated[bool, Meta(description="true when the client is exempt")] = False


class CancelAnswer(msgspec.Struct, kw_only=True):
    """What became of a slot."""

    cancelled: Annotated[bool, Meta(description="false: its time had come, or there is no such slot")]
    key: str
    id: str
    message: str
    rule: str
