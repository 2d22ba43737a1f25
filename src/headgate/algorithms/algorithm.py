"""The contract of an algorithm: two pure functions over a small state, and the same two in Lua and in SQL.

`evaluate` says what would happen, `consume` makes it happen; neither reads a clock or does I/O, so a store can look at
several quotas and spend only if all of them allow. In memory a state is one integer wherever that is possible, and
`IntegerState.take` has both functions in one.
The Lua of an algorithm has the functions ``quota``, ``load``, ``evaluate`` and ``consume``, and may have ``where``
(`headgate.redis.script` has the rest of the script, and lists what they take and give); the tests take both through
the same thousands of steps. Numbers stay below 2**53 there, and are passed to ``redis.call`` as they are: the server
writes all their digits, which Lua's own ``tostring`` would not.
The SQL of an algorithm is an `AlgorithmSQL`, which `headgate.postgresql.schema` puts into its functions.
"""

from __future__ import annotations

from types import FunctionType
from typing import Final, Generic, NamedTuple, TypeVar

from headgate.decision import Decision, Units, decision_in

State = TypeVar("State")

MILLION: Final = 1_000_000


class Algorithm(Units, Generic[State]):
    """A quota as an algorithm applies it. Times are whole microseconds."""

    __slots__ = ()

    def initial(self) -> State:
        """The state of a key never seen."""
        raise NotImplementedError

    def evaluate(self, state: State, now: int, permits: int) -> Decision:
        """Decide, and change nothing. With 0 permits: how things stand."""
        raise NotImplementedError

    def evaluate_above(self, state: State, now: int, permits: int, share: int) -> Decision:
        """The same for a call that must leave *share*, in millionths of the capacity."""
        above = self.evaluate(state, now, permits + reserve(self.limit, share))
        return self.evaluate(state, now, permits) if above._allowed else above

    def consume(self, state: State, now: int, permits: int) -> State:
        """The state after an allowed call; negative *permits* are given back, never above the capacity.

        For debts it may be called with more permits than there are: then the key is at its limit.
        """
        raise NotImplementedError

    def remaining(self, state: State, now: int) -> int:
        """Permits that could be had now."""
        raise NotImplementedError

    def is_expired(self, state: State, now: int) -> bool:
        """Whether the key is as good as never seen, so that its state can be forgotten."""
        raise NotImplementedError

    def redis_suffix(self, now: int) -> str:
        """What the Redis key of a state ends in at *now*, where that changes with time."""
        return ""

    def lua_arguments(self) -> tuple[int, ...]:
        """The numbers that the Lua twin needs, in the order of its ``quota`` function."""
        raise NotImplementedError

    def sql_arguments(self) -> tuple[int, int, int, int]:
        """The numbers that the SQL twin finds as ``n1`` to ``n4``."""
        raise NotImplementedError


def reserve(limit: int, share: int) -> int:
    """Permits that *share*, in millionths, is of *limit*, rounded up."""
    return -(-limit * share // MILLION)


class AlgorithmSQL(NamedTuple):
    """The twin of an algorithm in PL/pgSQL: statements for a function that has these variables, all of them bigint.

    now_us          the time; row_key  the key of the row
    a, b, c, d      the state, all 0 for a key never seen
    n1, n2, n3, n4  the numbers of the quota
    asked, spent    permits; negative ones are given back
    x, y            for any use; log_now, kept_c (c before *load*) and the record entry are there for a log

    *load* brings the state to now, and sets the boolean ``ahead`` if it lies so far ahead of the clock that the clock
    must have stepped back. *evaluate* follows it, and sets ``ok`` (boolean), ``left_permits``, ``full_us`` and
    ``wait_us``. *consume* follows it too: it sets the state after ``spent``, and ``gone``, the time from which the key
    is as good as never seen. Integers only; a product stays below 2**63.
    """

    number: int  # of the law in the database, never given to another
    load: str
    evaluate: str
    consume: str


class IntegerState(Algorithm[int]):
    """An algorithm whose state is one whole number, 0 for a key never seen. Its law is one function, `take`."""

    __slots__ = ()

    def take(self, state: int, now: int, permits: int) -> tuple[bool, int, int, int, int]:
        """Whether the call is allowed, the numbers of its `Decision` (used, reset, retry), and the state after it.

        Negative *permits* are given back. A denial leaves the state as it is.
        """
        raise NotImplementedError

    def initial(self) -> int:
        return 0

    def evaluate(self, state: int, now: int, permits: int) -> Decision:
        allowed, used, reset, retry, _ = self.take(state, now, permits)
        return decision_in(self, allowed, used, reset, retry)

    def consume(self, state: int, now: int, permits: int) -> int:
        allowed, used, _, _, after = self.take(state, now, permits)
        if allowed:
            return after
        left = max(self.limit + (-used // self.cost), 0)
        return self.take(state, now, left)[4]  # a debt: all that is left is spent

    def remaining(self, state: int, now: int) -> int:
        return max(self.limit + (-self.take(state, now, 0)[1] // self.cost), 0)

    def is_expired(self, state: int, now: int) -> bool:
        return self.take(state, now, 0)[2] == 0


_HALF: Final = 29
_LOW: Final = (1 << _HALF) - 1


def multiply(a: int, b: int) -> int:
    """a * b, for whole numbers of less than 58 bits, in steps that a signal cannot interrupt.

    CPython checks for signals while it multiplies large integers, and mypyc takes a handler that raises there (Ctrl-C,
    a time limit) for lack of memory and aborts the process. So compiled code multiplies in halves, each of which fits a
    register. Plain Python just multiplies.
    """
    if PLAIN:
        return a * b
    high_a, low_a, high_b, low_b = a >> _HALF, a & _LOW, b >> _HALF, b & _LOW
    return ((high_a * high_b) << (2 * _HALF)) + ((high_a * low_b + low_a * high_b) << _HALF) + low_a * low_b


PLAIN: Final = isinstance(multiply, FunctionType)
