"""The pool in Lua and the pool in Python give the same replies, and keep its promises in every trace."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from headgate.coordination.states.member import DEFAULT_RULES
from headgate.coordination.states.pool import POOL, UNANSWERED
from tests.support.servers import Server
from tests.support.twins import Twins

SECOND = 1_000_000
LEASE = 5 * SECOND
TIMES = (LEASE, 2 * SECOND)
PLAIN = (*TIMES, "1,0,1,1")  # slots, failures, open_for, successes, and limit and window of each quota
SLOTS = (*TIMES, "2,0,1,1")
LIMITED = (*TIMES, "1,0,1,1,2,4000000,3,10000000")
BROKEN = (*TIMES, "3,2,6000000,2,4,3000000")

IDS = st.sampled_from([f"l{number}" for number in range(12)])
NAMES = st.sampled_from("abc")
OUTCOMES = st.sampled_from(["success", "failure", "failure", ""])
ACTIONS = st.one_of(
    st.tuples(st.just("acquire"), IDS, st.sampled_from([0, 1])),
    st.tuples(st.just("acquire"), IDS, st.sampled_from([0, 1])),
    st.tuples(
        st.just("settle"),
        IDS,
        OUTCOMES,
        st.sampled_from([0, 0, SECOND, 7 * SECOND]),
        st.just(0),
        st.sampled_from([0, 1]),
    ),
    st.tuples(st.just("settle"), IDS, OUTCOMES, st.just(0), st.sampled_from([0, 1]), st.sampled_from([1, UNANSWERED])),
    st.tuples(st.just("renew"), IDS),
    st.tuples(st.just("add"), st.just(""), NAMES, NAMES),
    st.tuples(st.just("retire"), st.just(""), NAMES),
    st.tuples(st.just("add_new"), st.just(""), NAMES),
    st.tuples(st.just("status"), st.just("")),
    st.tuples(st.just("advance"), st.sampled_from([0.000001, 0.5, 1.0, 3.0, 5.0])),
)


def test_every_trace(redis_server: Server) -> None:
    """No member has more leases than slots, and every use is that of a lease."""

    @given(
        st.sampled_from([PLAIN, SLOTS, LIMITED, BROKEN]), st.lists(st.tuples(ACTIONS, st.integers(1, 2)), max_size=50)
    )
    def check(rules: tuple[int, int, str], trace: list[tuple[tuple[Any, ...], int]]) -> None:
        twins = Twins(POOL, redis_server)
        twins.step("add", "", *rules, "a", "b")
        held: dict[str, tuple[str, int]] = {}
        for (op, *arguments), times in trace:
            now = twins.clock.now()
            if op == "advance":
                twins.clock.advance(arguments[0])
                continue
            id, *rest = arguments
            answer = twins.step(op, id, *rules, *rest, times=times)
            held = {holder: lease for holder, lease in held.items() if lease[1] > now}
            if op == "acquire" and answer[0] == 1:
                assert id not in held or held[id][0] == answer[1]
                held.setdefault(id, (answer[1], now + LEASE))
            elif op == "settle":
                assert (answer[0] == 1) == (id in held) or id not in held
                held.pop(id, None)
            elif op == "renew":
                assert answer[0] == (id in held)
                if id in held:
                    held[id] = (held[id][0], now + LEASE)
            members = [member for member, _ in held.values()]
            assert all(members.count(member) <= int(rules[2][0]) for member in members), "more than its slots"
            status = twins.step("status", "", *rules)[1:]
            used = dict(zip(status[::6], status[2::6], strict=True))
            assert {member: members.count(member) for member in used} == used, "a use without a lease"
        twins.close()

    check()


def test_new_rules(redis_server: Server) -> None:
    """New rules hold for members that are ready, leased, at their quota or broken, from each row to the next."""
    twins = Twins(POOL, redis_server)

    table = [
        "",  # keeps those that hold
        "1,2,9000000,2,2,60000000",
        "3,2,9000000,1",
        "",
        "2,1,9000000,1,3,60000000",
        DEFAULT_RULES,
        "2,0,9000000,1,1,60000000",
        "1,1,9000000,3",
    ]
    for number, rules in enumerate(table * 2):
        common = (5 * SECOND, 2 * SECOND, rules)
        twins.step("add", "", *common, f"m{number % 4}", times=2)
        twins.step("status", "", *common)
        for turn in range(4):
            id = f"{number}.{turn}"
            twins.step("acquire", id, *common, 0)
            if turn:
                twins.step("settle", id, *common, "failure" if turn == 2 else "success", turn * SECOND, 0, 1)
            twins.step("status", "", *common)
        twins.clock.advance(2 * number)
    twins.close()


def test_many_chunks(redis_server: Server) -> None:
    """While quotas change, both count the same uses, never too many, and drop the chunks that no quota counts."""
    twins = Twins(POOL, redis_server)
    large, small = "1,0,1,1,150,60000000,20,1000000", "1,0,1,1,20,1000000"
    uses: list[int] = []
    for number in range(700):
        rules = (*TIMES, {250: small, 300: "1,0,1,1", 320: large}.get(number, large if number == 0 else ""))
        if rules[2]:
            twins.step("add", "", *rules, "a")
        granted, _, wait = twins.step("acquire", f"{number}", *rules, 0)
        if granted == 0:
            twins.clock.advance(wait / SECOND)
            assert twins.step("acquire", f"{number}", *rules, 0)[0] == 1, "the wait was too short"
        if number < 250 or number >= 320:
            uses = [use for use in uses if use > twins.clock.now() - 60 * SECOND]
            assert len(uses) < 150
        uses.append(twins.clock.now())
        twins.step("settle", f"{number}", *rules, "success", 0, 0, 1)
        twins.clock.advance(0.01 if number % 3 else 0.3)
    client = redis_server.client()
    assert client.hlen("pool:{twins}:log") <= 2 + 150 // 64 + 2, "chunks that no quota counts are kept"
    for number in range(700, 1100):  # without a quota, and at one moment
        rules = (*TIMES, "1,0,1,1" if number == 700 else "")
        if rules[2]:
            twins.step("add", "", *rules, "a")
        assert twins.step("acquire", f"{number}", *rules, 0)[0] == 1
        twins.step("settle", f"{number}", *rules, "success", 0, 0, UNANSWERED if number % 50 else 1)
    assert client.hlen("pool:{twins}:log") <= 2 + 150 // 64 + 2, "chunks that no quota counts are kept"
    assert max(map(len, client.hvals("pool:{twins}:log"))) <= 64 * 16
    twins.close()
