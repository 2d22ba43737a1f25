"""Quotas, how many permits in what time: ``100/minute``, ``80/10 minutes``, ``10/second burst 100``."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction

from headgate.errors import InvalidQuota

FORM = "N/period or N per period, then optionally burst B: '100/minute', '80/10 minutes', '10/second burst 100'"

_SECONDS = {"second": 1, "minute": 60, "hour": 3600, "day": 86400}
_UNITS = {"ms": Fraction(1, 1000), "us": Fraction(1, 1_000_000)}
for _name, _length in _SECONDS.items():
    _UNITS |= {_name: Fraction(_length), _name + "s": Fraction(_length), _name[0]: Fraction(_length)}
_UNITS |= {"sec": Fraction(1), "secs": Fraction(1), "min": Fraction(60), "mins": Fraction(60)}

_TEXT = re.compile(
    r"\s*(?P<limit>[\d_,]+)\s*(?:/|\s+per\s+)\s*(?P<multiple>\d+(?:\.\d+)?)?\s*(?P<unit>[a-z]+)"
    r"(?:\s+burst\s+(?P<burst>[\d_,]+))?\s*",
    re.IGNORECASE | re.ASCII,
)

_SEPARATOR = re.compile(r"\s*(?:[;|&+]|(?<=[a-z])\s*,)\s*", re.IGNORECASE)  # as other libraries have between quotas

_MAX_COUNT = 1_000_000_000
_LONGEST = 3660 * 86400  # seconds, ten years: numbers of microseconds that a double counts exactly


@dataclass(frozen=True, slots=True)
class Quota:
    """So many permits in so much time: ``Quota(limit=100, period=60.0)``, or as text ``"100/minute"``.

    Immutable and hashable. ``str(quota)`` gives text that `Quota.parse` reads back to an equal value.

    Args:
        limit: permits in a period
        period: seconds, from a microsecond to ten years
        burst: what a bucket may hold at once; None: *limit*. Not for windows

    Raises:
        InvalidQuota: a number is out of range
    """

    limit: int
    period: float
    burst: int | None = None

    def __post_init__(self) -> None:
        _check_count("limit", self.limit)
        if self.burst is not None:
            _check_count("burst", self.burst)
        period = self.period
        if isinstance(period, bool) or not isinstance(period, int | float) or not math.isfinite(period):
            raise InvalidQuota(f"period must be a number of seconds, got {period!r}")
        if not 0.000_001 <= period <= _LONGEST:
            raise InvalidQuota(f"period must be from a microsecond to {_LONGEST // 86400} days, got {period!r} seconds")
        object.__setattr__(self, "period", self.period_us / 1_000_000)

    @property
    def period_us(self) -> int:
        """The period in whole microseconds, the finest that headgate counts."""
        return round(self.period * 1_000_000)

    @property
    def capacity(self) -> int:
        """The most that can be had at once."""
        return self.limit if self.burst is None else self.burst

    @classmethod
    def parse(cls, text: str | Quota) -> Quota:
        """Read a quota from text; a `Quota` passes through.

        Args:
            text: such as ``100/minute``, ``80/10 minutes`` or ``10/second burst 100``

        Raises:
            InvalidQuota: the text is none; the message says what would be
        """
        if isinstance(text, Quota):
            return text
        if not isinstance(text, str):
            raise InvalidQuota(f"a quota is text or a Quota, got {type(text).__name__} {text!r:.80}; write {FORM}")
        found = _TEXT.fullmatch(text)
        if not found:
            several = [part for part in _SEPARATOR.split(text[:80]) if part]
            if len(several) > 1:
                raise InvalidQuota(f"{text!r:.80} is not one quota; several are a list: {several}")
            raise InvalidQuota(f"cannot read the quota {text!r:.80}; write {FORM}")
        unit = _UNITS.get(found["unit"].lower())
        if unit is None:
            raise InvalidQuota(
                f"unknown period {found['unit']!r} in {text!r:.80}; use second, minute, hour, day, s, m, h, d or ms, "
                "with a multiple if need be: '100/5m', '80/10 minutes'"
            )
        period = Fraction(found["multiple"] or 1) * unit
        if period * 1_000_000 % 1:
            raise InvalidQuota(f"the period of {text!r:.80} is not a whole number of microseconds")
        burst = found["burst"]
        return cls(_count(found["limit"]), float(period), None if burst is None else _count(burst))

    def __str__(self) -> str:
        burst = "" if self.burst is None else f" burst {self.burst}"
        return f"{self.limit}/{_period_text(self.period_us)}{burst}"


def _count(text: str) -> int:
    try:
        return int(text.replace(",", "").strip("_"))
    except ValueError:
        raise InvalidQuota(f"{text!r:.40} is not a whole number; write {FORM}") from None


def _check_count(what: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidQuota(f"{what} must be a whole number, got {value!r}; write {FORM}")
    if not 1 <= value <= _MAX_COUNT:
        raise InvalidQuota(f"{what} must be from 1 to {_MAX_COUNT:,}, got {value}")


def _period_text(period_us: int) -> str:
    """The shortest of '5m', '1.5s', 'hour': a word for one of a unit, else a multiple of the largest that divides."""
    for name, length in reversed(_SECONDS.items()):
        multiple, rest = divmod(period_us, length * 1_000_000)
        if multiple and not rest:
            return name if multiple == 1 else f"{multiple}{name[0]}"
    return f"{period_us}us" if period_us % 1000 else f"{period_us // 1000}ms"
