"""The queue in Lua and the queue in Python give the same replies as a list, which models both, in every trace."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from headgate.coordination.states.queue import QUEUE
from tests.support.servers import Server
from tests.support.twins import Twins

SECOND = 1_000_000
IDS = st.sampled_from("abcdef")
WAITERS = st.sampled_from(["v", "w"])
ANY_WAITER = st.sampled_from(["", "v", "w"])
NONE = st.just("")
TIME = st.just(10 * SECOND)
ACTIONS = st.one_of(
    st.tuples(st.just("enqueue"), IDS, st.sampled_from([3 * SECOND, 10 * SECOND]), st.just(2 * SECOND), WAITERS),
    st.tuples(st.just("enqueue"), IDS, TIME, st.just(0), NONE),
    st.tuples(st.just("dequeue"), NONE, TIME, st.just(0), NONE),
    st.tuples(st.just("undo"), NONE, TIME, st.just(2 * SECOND), NONE),
    st.tuples(st.just("cancel"), IDS, TIME, st.just(0), ANY_WAITER),
    st.tuples(st.just("status"), IDS, TIME, st.sampled_from([0, 2 * SECOND]), ANY_WAITER),
    st.tuples(st.just("heartbeat"), IDS, TIME, st.just(2 * SECOND), WAITERS),
    st.tuples(st.just("size"), NONE, TIME, st.just(0), NONE),
    st.tuples(st.just("advance"), st.sampled_from([0.000001, 0.5, 1.9, 3.0])),
)


def test_every_trace(redis_server: Server) -> None:
    """Positions, expiry, cancellation and undo, with a list as the model."""

    @given(st.sampled_from([0, 3]), st.lists(st.tuples(ACTIONS, st.integers(1, 2)), max_size=40))
    def check(most: int, trace: list[tuple[tuple[Any, ...], int]]) -> None:
        twins = Twins(QUEUE, redis_server)
        line: list[str] = []
        ends: dict[str, list[int]] = {}
        waiters: dict[str, str] = {}  # by id
        taken: tuple[str, str, list[int]] | None = None  # the last dequeue: its call, the entry, its ends
        out = told = False  # the entry was not cancelled or enqueued again; its waiter knows that it was served
        for serial, ((op, *arguments), times) in enumerate(trace):
            if op == "advance":
                twins.clock.advance(arguments[0])
                continue
            id, timeout, heartbeat_ttl, waiter = arguments
            call = "" if op in ("status", "heartbeat", "size") else f"{op}{serial}"
            if op == "undo":
                if taken is None:
                    continue
                call = taken[0]
            now = twins.clock.now()
            line = [each for each in line if min(ends[each]) > now]
            owned = not waiter or waiters.get(id) == waiter
            pair = (id, waiter, "f", "v") if op == "heartbeat" else ()
            [answer, *_] = twins.step(op, call, id, timeout, most, heartbeat_ttl, waiter, *pair, times=times)
            if op == "heartbeat" and "f" in line and waiters.get("f") == "v":
                ends["f"][1] = now + heartbeat_ttl
            if op == "enqueue" and id in line:
                assert answer == line.index(id)
                ends[id] = [max(now + timeout, ends[id][0]), now + heartbeat_ttl] if heartbeat_ttl else ends[id]
            elif op == "enqueue" and most and len(line) >= most:
                assert answer == -1
            elif op == "enqueue":
                assert answer == len(line)
                line.append(id)
                out = out and taken is not None and taken[1] != id
                ends[id] = [now + timeout, now + heartbeat_ttl if heartbeat_ttl else 10**18]
                waiters.pop(id, None)
            elif op == "dequeue":
                assert answer == (line[0] if line else "")
                taken = (call, line[0], ends[line[0]]) if line else None
                out, told = True, False
                line = line[1:]
            elif op == "undo" and taken:
                if taken[2][0] > now and out:
                    line.insert(0, taken[1])
                    ends[taken[1]] = [taken[2][0], now + heartbeat_ttl if taken[2][1] < 10**18 and not told else 10**18]
                taken = None
            elif op == "cancel":
                assert answer == (owned and id in line)
                line = [each for each in line if each != id or not owned]
                out = out and taken is not None and (taken[1] != id or not owned)
            elif op in ("status", "heartbeat"):
                assert (answer == "waiting") == (owned and id in line)
                if owned and id in line and heartbeat_ttl:
                    ends[id][1] = now + heartbeat_ttl
                served = [id, "f"] if op == "heartbeat" and waiters.get("f") == "v" else [id]
                told = told or (
                    heartbeat_ttl > 0 and taken is not None and taken[1] in served[0 if owned else 1 :] and out
                )
            if op == "enqueue" and answer >= 0 and heartbeat_ttl:
                waiters[id] = waiter
            assert twins.step("size", "", "", SECOND, most, 0) == [len(line)]
        twins.close()

    check()
