"""The lock in Lua and the lock in Python give the same replies, and keep the promises of a lock in every trace."""

from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from headgate.clock import MICROSECONDS
from headgate.coordination.states.lock import LOCK, MAX_RELEASED, RELEASED_TTL
from tests.support.servers import Server
from tests.support.twins import Twins

OWNERS = st.sampled_from("abc")
TTL = 30_000


def comparable(answer: Sequence[Any]) -> Sequence[Any]:
    """The reply, with only the sign of the wait: a server counts TTLs by its own clock."""
    return [*answer[:2], answer[2] > 0] if len(answer) == 3 else answer


class LockTwins(Twins):
    def comparable(self, answer: Sequence[Any]) -> Sequence[Any]:
        return comparable(answer)

    def expire(self) -> None:
        """Let the holder's TTL end and released owners be forgotten; only the last fence stays."""
        self.clock.advance(RELEASED_TTL / MICROSECONDS)
        self.server.client().delete(self.machine.keys(self.name)[0])

    def forget_the_counter(self) -> None:
        """Lose the last fence, as by an eviction."""
        if state := self.memory._states.get(("lock", self.name)):  # memory may have dropped the expired state
            state.last = 0
        self.server.client().delete(self.machine.keys(self.name)[1])


ACTIONS = st.one_of(
    st.tuples(st.just("acquire"), OWNERS, st.just(TTL), st.sampled_from(["", "a", "b"])),
    st.tuples(st.just("renew"), OWNERS, st.just(TTL)),
    st.tuples(st.just("release"), OWNERS, st.just(TTL)),
    st.tuples(st.just("peek"), OWNERS, st.just(TTL)),
    st.tuples(st.just("evict"), st.sampled_from("xyz"), st.just(TTL)),
    st.tuples(st.sampled_from(["expire", "forget", "tick"])),
)


def test_every_trace(redis_server: Server) -> None:
    """One holder at a time, and fences that only grow."""

    @given(st.lists(st.tuples(ACTIONS, st.integers(1, 2)), max_size=25))
    def check(trace: list[tuple[tuple[Any, ...], int]]) -> None:
        twins = LockTwins(LOCK, redis_server)
        last, holder, evicted = 0, "", set[str]()
        for (op, *arguments), times in trace:
            if op == "expire":
                twins.expire()
                holder = ""
                evicted.clear()
            elif op == "forget":
                if holder == "" and last:
                    twins.forget_the_counter()
                    twins.clock.advance(0.001)  # losing a key takes some time
            elif op == "tick":
                twins.clock.advance(0.25)
            else:
                answer = twins.step(op, *arguments, times=times)
                if op == "acquire" and answer[0] == 1:
                    assert holder in ("", arguments[0], arguments[2]), "taken from its holder"
                    assert answer[1] == last if holder == arguments[0] else answer[1] > last, "the fence went back"
                    holder, last = arguments[0], answer[1]
                elif op == "release" and answer[0] == 1 and holder == arguments[0]:
                    holder = ""
                elif op == "peek":
                    assert answer == [holder == arguments[0], holder != ""]
                elif op == "evict" and answer[0] == 1 and arguments[0] not in evicted:
                    evicted.add(arguments[0])
                    holder = ""
        twins.close()

    check()


def test_released_owners_are_forgotten(redis_server: Server) -> None:
    """After ten minutes, or when there are too many."""
    twins = LockTwins(LOCK, redis_server)
    client, key = redis_server.client(), LOCK.keys(twins.name)[2]

    def remembered() -> set[int]:
        return {len(twins.memory._states[("lock", twins.name)].released), client.zcard(key)}

    for number in range(MAX_RELEASED + 5):
        twins.step("release", str(number), TTL)
        assert remembered() == {min(number + 1, MAX_RELEASED)}
    twins.clock.advance(RELEASED_TTL / MICROSECONDS)
    twins.step("release", "last", TTL)
    assert remembered() == {1}
    twins.close()
