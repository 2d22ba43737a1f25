"""The queue in Lua and the queue in Python are one queue, and it keeps its promises in every trace."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from headgate.coordination.states.queue import QUEUE
from tests.support.servers import Server
from tests.support.twins import Twins

SECOND = 1_000_000
IDS = st.sampled_from("abcdef")
WAITERS = st.sampled_from(["v", "w"])
ANYBODY = st.sampled_from(["", "v", "w"])
NOBODY = st.just("")
TIME = st.just(10 * SECOND)
ACTIONS = st.one_of(
    st.tuples(st.just("enqueue"), IDS, st.sampled_from([3 * SECOND, 10 * SECOND]), st.just(2 * SECOND), WAITERS),
    st.tuples(st.just("enqueue"), IDS, TIME, st.just(0), NOBODY),
    st.tuples(st.just("dequeue"), NOBODY, TIME, st.just(0), NOBODY),
    st.tuples(st.just("undo"), NOBODY, TIME, st.just(2 * SECOND), NOBODY),
    st.tuples(st.just("cancel"), IDS, TIME, st.just(0), ANYBODY),
    st.tuples(st.just("status"), IDS, TIME, st.sampled_from([0, 2 * SECOND]), ANYBODY),
    st.tuples(st.just("heartbeat"), IDS, TIME, st.just(2 * SECOND), WAITERS),
    st.tuples(st.just("size"), NOBODY, TIME, st.just(0), NOBODY),
    st.tuples(st.just("advance"), st.sampled_from([0.000001, 0.5, 1.9, 3.0])),
)


def test_every_trace(redis_server: Server) -> None:
    """Beside both runs a list, which is what a queue is."""

    @given(st.sampled_from([0, 3]), st.lists(st.tuples(ACTIONS, st.integers(1, 2)), max_size=40))
    def check(most: int, trace: list[tuple[tuple[Any, ...], int]]) -> None:
        twins = Twins(QUEUE, redis_server)
        line: list[str] = []
        ends: dict[str, list[int]] = {}
        waits: dict[str, str] = {}  # who, for which id
        taken: tuple[str, str, list[int]] | None = None  # by which call, whom, until when it would have stayed
        out = told = False  # nobody has cancelled it or put it in again; whoever waited for it knows
        for serial, ((op, *arguments), times) in enumerate(trace):
            if op == "advance":
                twins.clock.advance(arguments[0])
                continue
            id, timeout, beat, waiter = arguments
            call = "" if op in ("status", "heartbeat", "size") else f"{op}{serial}"
            if op == "undo":
                if taken is None:
                    continue
                call = taken[0]
            now = twins.clock.now()
            line = [each for each in line if min(ends[each]) > now]
            mine = not waiter or waits.get(id) == waiter
            pair = (id, waiter, "f", "v") if op == "heartbeat" else ()
            [answer, *_] = twins.step(op, call, id, timeout, most, beat, waiter, *pair, times=times)
            if op == "heartbeat" and "f" in line and waits.get("f") == "v":
                ends["f"][1] = now + beat
            if op == "enqueue" and id in line:
                assert answer == line.index(id)
                ends[id] = [max(now + timeout, ends[id][0]), now + beat] if beat else ends[id]
            elif op == "enqueue" and most and len(line) >= most:
                assert answer == -1
            elif op == "enqueue":
                assert answer == len(line)
                line.append(id)
                out = out and taken is not None and taken[1] != id
                ends[id] = [now + timeout, now + beat if beat else 10**18]
                waits.pop(id, None)
            elif op == "dequeue":
                assert answer == (line[0] if line else "")
                taken = (call, line[0], ends[line[0]]) if line else None
                out, told = True, False
                line = line[1:]
            elif op == "undo" and taken:
                if taken[2][0] > now and out:
                    line.insert(0, taken[1])
                    ends[taken[1]] = [taken[2][0], now + beat if taken[2][1] < 10**18 and not told else 10**18]
                taken = None
            elif op == "cancel":
                assert answer == (mine and id in line)
                line = [each for each in line if each != id or not mine]
                out = out and taken is not None and (taken[1] != id or not mine)
            elif op in ("status", "heartbeat"):
                assert (answer == "waiting") == (mine and id in line)
                if mine and id in line and beat:
                    ends[id][1] = now + beat
                served = [id, "f"] if op == "heartbeat" and waits.get("f") == "v" else [id]
                told = told or (beat > 0 and taken is not None and taken[1] in served[0 if mine else 1 :] and out)
            if op == "enqueue" and answer >= 0 and beat:
                waits[id] = waiter
            assert twins.step("size", "", "", SECOND, most, 0) == [len(line)]
        twins.close()

    check()
