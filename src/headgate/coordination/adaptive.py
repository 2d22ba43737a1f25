"""The adaptive limit of a semaphore: up by one after enough successes, down by a share at a sign of overload.

`Adaptive` is what a caller may set, and tells what the end of a lease says about the server. `KeptLimit` is the law by
which memory changes the limit, `LUA_ADAPT` the same for Redis.

The settings are one text, ``start:low:high:grow_after:shrink``: the limit starts at *start* and stays from *low* to
*high*. It grows by one after *grow_after* successes (0: as many as the limit is), and shrinks to *shrink* thousandths
of itself, by one at least.

A success counts only if at least half of the limit was in use: an idle system says nothing about what it could bear. A
lease counts only if it was granted after the limit was lowered last, which its fence tells. So the calls that
were under way when the server became overloaded lower the limit once, and not once each.

The last limit, the successes since it changed and the fence at which it was lowered last are kept together, in the Hash
`last` of a semaphore in Redis.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from headgate.coordination.arguments import check_count, check_seconds
from headgate.coordination.feedback import ExceptionKinds, exception_test, logger

SUCCESS, OVERLOADED = 1, -1  # how a lease ended; 0: neither

# `adapt` is called before the lease is gone. It uses `last`, `used` and `format_int` of the script around it.
LUA_ADAPT = """
local function adapt(outcome, fence)
  local settings = redis.call('HGET', last, 'adaptive') or ''
  local low, high, grow_after, shrink = string.match(settings, '^%d+:(%d+):(%d+):(%d+):(%d+)$')
  if not low or fence <= tonumber(redis.call('HGET', last, 'lowered') or 0) then return end
  local limit = tonumber(redis.call('HGET', last, 'limit'))
  local new = limit
  if outcome < 0 then
    new = math.max(tonumber(low), math.min(limit - 1, math.floor(limit * shrink / 1000)))
    redis.call('HSET', last, 'lowered', redis.call('HGET', last, 'fence') or 0, 'successes', 0)
  elseif used() * 2 >= limit then
    local needed = grow_after == '0' and limit or tonumber(grow_after)
    if redis.call('HINCRBY', last, 'successes', 1) >= needed then
      new = math.min(tonumber(high), limit + 1)
      redis.call('HSET', last, 'successes', 0)
    end
  end
  if new ~= limit then redis.call('HSET', last, 'limit', format_int(new)) end
end
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adaptive:
    """Let the limit of a `Semaphore` follow what a server bears, for all processes together.

    It grows by one after so many successes and shrinks by a share at a sign of overload: a call of `overloaded()`, an
    exception that *overload* names, or a lease that was held for longer than *target*. Other exceptions count for
    nothing.

    Args:
        max: the limit never grows above it
        min: the limit never shrinks below it; no caller may weigh more
        grow_after: successes before it grows by one; None: as many as the limit is
        shrink: what is left of it after an overload, as a share from 0.001 to 0.999
        target: seconds; None: how long a lease is held does not matter
        overload: types of exceptions, or a function of one, that mean that the server has too much to do
    """

    max: int
    min: int = 1
    grow_after: int | None = None
    shrink: float = 0.9
    target: float | None = None
    overload: ExceptionKinds = TimeoutError
    _means_overload: Callable[[BaseException], bool] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if check_count("min", self.min) > check_count("max", self.max):
            raise ValueError(f"min must be at most max, which is {self.max}, got {self.min}")
        if self.grow_after is not None:
            check_count("grow_after", self.grow_after)
        number = isinstance(self.shrink, int | float) and not isinstance(self.shrink, bool)
        if not number or not 0.001 <= self.shrink <= 0.999:
            raise ValueError(f"shrink must be a share from 0.001 to 0.999, such as 0.9, got {self.shrink!r:.80}")
        if self.target is not None:
            check_seconds("target", self.target)
        object.__setattr__(self, "_means_overload", exception_test("overload", self.overload))

    def settings(self, start: int) -> str:
        """The text by which the store knows it; *start* is the limit to begin with."""
        if not self.min <= start <= self.max:
            raise ValueError(f"limit, where it starts, must be from min={self.min} to max={self.max}, got {start}")
        return f"{start}:{self.min}:{self.max}:{self.grow_after or 0}:{round(self.shrink * 1000)}"

    def outcome(self, error: BaseException | None, seconds: float) -> int:
        """What a lease that ended with *error* after so many seconds says: success, overloaded, or 0 for neither."""
        if self.target is not None and seconds > self.target:
            return OVERLOADED
        if error is None:
            return SUCCESS
        try:
            return OVERLOADED if self._means_overload(error) else 0
        except Exception:  # an error of *overload* must not replace the error of the call
            logger.exception("overload of an adaptive semaphore failed")
            return 0


class KeptLimit:
    """`LUA_ADAPT` in Python: the limit that was set last, with what it adapts by."""

    def __init__(self, limit: int = 0, adaptive: str = "") -> None:
        self.limit = limit  # 0: none is kept
        self.adaptive = adaptive  # the settings; "" if the limit is fixed
        self.successes = 0
        self.lowered = 0

    def adapt(self, outcome: int, fence: int, used: int, last_fence: int) -> None:
        """Count a lease that is about to end; *used* is the weight of all leases with it."""
        if not self.adaptive or fence <= self.lowered:
            return
        _, low, high, grow_after, shrink = map(int, self.adaptive.split(":"))
        if outcome == OVERLOADED:
            self.limit = max(low, min(self.limit - 1, self.limit * shrink // 1000))
            self.lowered, self.successes = last_fence, 0
        elif used * 2 >= self.limit:
            self.successes += 1
            if self.successes >= (grow_after or self.limit):
                self.limit, self.successes = min(high, self.limit + 1), 0
