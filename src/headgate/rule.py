"""What a limiter enforces: its name, its quotas and the algorithm that applies them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

from headgate.algorithms import ALGORITHMS as ALGORITHMS
from headgate.algorithms import VARIANTS, AlgorithmSpec
from headgate.algorithms import AlgorithmName as AlgorithmName
from headgate.algorithms import Start as Start
from headgate.algorithms.algorithm import MILLION, Algorithm, reserve
from headgate.algorithms.all_of import AllOf
from headgate.algorithms.bucket import Bucket
from headgate.errors import InvalidPermits, InvalidQuota, PermitsExceedLimit
from headgate.keys import check_key
from headgate.quota import FORM, Quota

Quotas = str | Quota | Sequence[str | Quota]

OnStoreError = Literal["allow", "deny", "local", "raise"]
POLICIES: tuple[OnStoreError, ...] = get_args(OnStoreError)


class Rule:
    """The checked arguments of a limiter, from which a store makes its backend."""

    def __init__(
        self, quotas: Quotas, algorithm: str = "token_bucket", name: str = "default", start: str = "clock"
    ) -> None:
        self.kind: AlgorithmName = check_algorithm(algorithm)
        self.start: Start = check_start(start, self.kind)
        self.state_kind: str = "first_window" if self.start == "first" else self.kind  # in labels and Redis keys
        self.spec: AlgorithmSpec = VARIANTS.get(self.state_kind) or ALGORITHMS[self.kind]
        self.name = check_key(name, "name")
        self.quotas = _parse(quotas)
        self.parts: list[Algorithm[Any]] = [self.spec.make(quota) for quota in self.quotas]
        self.algorithm = self.parts[0] if len(self.parts) == 1 else AllOf(self.parts)
        self.capacity = self.algorithm.limit

    @property
    def is_bucket(self) -> bool:
        """Whether its quotas are buckets, which refill all the time and can be booked."""
        return isinstance(self.parts[0], Bucket)

    @property
    def label(self) -> tuple[object, ...]:
        """Limiters on one store share their states if their labels are equal."""
        return (self.name, self.state_kind, *self.quotas)


def _parse(quotas: Quotas) -> list[Quota]:
    if isinstance(quotas, str | Quota):
        return [Quota.parse(quotas)]
    if not isinstance(quotas, Sequence) or isinstance(quotas, bytes) or not quotas:
        raise InvalidQuota(f"give a quota or a list of at least one, got {quotas!r:.80}; write {FORM}")
    return list(dict.fromkeys(Quota.parse(quota) for quota in quotas))


def check_permits(permits: object, limit: int = 0, least: int = 1) -> int:
    """Return *permits* if it is a count of permits, of at most *limit* unless that is 0; else raise."""
    if isinstance(permits, bool) or not isinstance(permits, int) or permits < least:
        raise InvalidPermits(f"permits must be a whole number of at least {least}, got {permits!r:.40}")
    if limit and permits > limit:
        raise PermitsExceedLimit(f"permits must be at most {limit}, the capacity; {permits} could never be granted")
    return int(permits)  # a subclass could print as it likes


def check_floor(floor: object, permits: object, parts: Sequence[Algorithm[Any]]) -> tuple[int, int]:
    """*permits*, and *floor* in millionths, if so many permits can be had above it in every part; else raise."""
    if isinstance(floor, bool) or not isinstance(floor, int | float) or not 0 <= floor < 1:
        raise ValueError(f"floor must be a share of the capacity from 0 up to, but not, 1, got {floor!r:.40}")
    share = round(floor * MILLION)
    most = min(part.limit - reserve(part.limit, share) for part in parts)
    if check_permits(permits) > most:
        raise PermitsExceedLimit(f"permits must be at most {most}, what the capacity has above a floor of {floor:g}")
    return check_permits(permits), share


def check_algorithm(algorithm: object) -> AlgorithmName:
    """Return the name of *algorithm*, which may be in capitals as the service writes it; raise if there is none."""
    text = algorithm.lower() if isinstance(algorithm, str) else ""
    for name in ALGORITHMS:
        if name == text:
            return name
    raise ValueError(f"unknown algorithm {algorithm!r:.40}; use one of {', '.join(ALGORITHMS)}")


def check_start(start: object, kind: AlgorithmName) -> Start:
    """Return *start* if windows of this *kind* can start there; else raise."""
    if start == "clock":
        return "clock"
    if start != "first":
        raise ValueError(f"start must be 'clock' or 'first', got {start!r:.40}")
    if kind != "fixed_window":
        raise ValueError(f"start='first' is for algorithm='fixed_window'; {kind} has no window that a call starts")
    return "first"


def check_policy(policy: object) -> OnStoreError:
    """Return *policy* if it is a value of ``on_store_error``; else raise."""
    for known in POLICIES:
        if known == policy:
            return known
    raise ValueError(f"on_store_error must be one of {', '.join(POLICIES)}, got {policy!r:.40}")
