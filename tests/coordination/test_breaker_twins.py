"""The breaker in Lua and the breaker in Python give the same replies, and keep its promises in every trace."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from headgate.coordination.states.breaker import BREAKER
from tests.support.servers import Server
from tests.support.twins import Twins

SECOND = 1_000_000
RULES = (3, 10 * SECOND, 2, 4 * SECOND)  # failures, open_for, successes, lease
IN_A_ROW = (*RULES, 0, 60 * SECOND, 5)
BY_RATE = (*RULES, 500_000, 20 * SECOND, 4)

IDS = st.sampled_from("abcdefgh")
OUTCOMES = st.sampled_from(["success", "failure", "failure", "failure", "ignored", "refused"])
ACTIONS = st.one_of(
    st.tuples(st.just("admit"), IDS, st.just(-1), st.just("")),
    st.tuples(st.just("report"), IDS, st.sampled_from([-1, 0, 1, 2]), OUTCOMES),  # -1: any; 0: this generation
    st.tuples(st.just("recover"), IDS, st.just(-1), st.just("")),
    st.tuples(st.just("peek"), IDS, st.just(-1), st.just("")),
    st.tuples(st.just("force"), IDS, st.just(-1), st.sampled_from(["OPEN", "CLOSED", "", ""])),
    st.tuples(st.just("advance"), st.sampled_from([0.000001, 0.5, 2.0, 4.0, 10.0])),
    st.tuples(st.just("advance"), st.sampled_from([0.1])),
)


def test_every_trace(redis_server: Server) -> None:
    """OPEN admits no call, HALF_OPEN no more probes than allowed, and a late report changes nothing."""

    @given(st.sampled_from([IN_A_ROW, BY_RATE]), st.lists(st.tuples(ACTIONS, st.integers(1, 2)), max_size=40))
    def check(rules: tuple[int, ...], trace: list[tuple[tuple[Any, ...], int]]) -> None:
        twins = Twins(BREAKER, redis_server)
        number, state, probes, extra = 0, "CLOSED", dict[str, int](), 0
        for serial, ((op, *arguments), times) in enumerate(trace):
            if op == "advance":
                twins.clock.advance(arguments[0])
                continue
            id, ago, outcome = arguments
            if op in ("force", "recover"):
                id = f"{id}{serial}"  # callers choose a new id for each of these
            admitted_in = ago if ago < 0 else max(number - ago, 0)
            answer = twins.step(op, id, admitted_in, outcome, *rules, times=times)
            allowed, now_state, now_number, probe, wait = answer[:5]
            assert now_number >= number
            assert wait >= 0
            if now_number != number:
                probes, extra = {}, 0
            if op == "report" and admitted_in >= 0 and admitted_in != number:
                assert now_number == number, "a late result changed the state"
            if op == "report":
                freed = probes.pop(id, None)
                extra += bool(freed and freed > twins.clock.now() and outcome == "refused")
            number, state = now_number, now_state
            probes = {probe: until for probe, until in probes.items() if until > twins.clock.now()}
            if op == "admit" and allowed:
                assert state != "OPEN"
                if probe:
                    probes.setdefault(id, twins.clock.now() + RULES[3])
            assert len(probes) <= RULES[2] + min(extra, RULES[2])
        twins.close()

    check()
