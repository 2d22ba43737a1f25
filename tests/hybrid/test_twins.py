"""The ledger in Python and the script in Redis, walked through the same steps: every reply and every field alike."""

from __future__ import annotations

import random
from typing import Any

import pytest

from headgate.hybrid import script
from headgate.hybrid.ledger import Ledger
from headgate.hybrid.protocol import PROFILES, LeaseReply, LeaseRequest, quota_params
from headgate.rule import Rule
from headgate.stores.base import LeaseCall
from headgate.stores.redis import RedisStore
from tests.support.hybrid_exact import check_ledger
from tests.support.servers import Server

START = 1_700_000_000_000_000
QUOTAS = {
    "token_bucket": [
        "10/second burst 5",
        "7/second burst 20",
        "3/minute",
        "1000000/second burst 1000",
        "1000/hour",
        "97/second burst 60",
    ],
    "fixed_window": ["5/10s", "20/second", "100/minute"],
    "sliding_window_counter": ["5/10s", "20/second", "100/minute"],
}
NUMBERS = ["at", "demand", "exp", "born"]


def some_request(dice: random.Random, seqs: dict[str, int], lids: dict[str, int], limit: int) -> LeaseRequest:
    """Anything that a process might say, and some that none would."""
    node = dice.choice(["a", "b", "c", "d"])
    seqs[node] = seqs.get(node, 0) + dice.choice([1, 1, 1, 1, 0, 3])
    seq = seqs[node] - dice.choice([0, 0, 0, 0, 1])

    def many(most: int) -> int:
        return dice.choice([0, 0, 1, dice.randint(0, most)])

    return LeaseRequest(
        op=dice.choice(["sync"] * 8 + ["release", "reset", "peek"]),
        node=node,
        lease_id=dice.choice([lids.get(node, 0)] * 4 + [0, 0, START - 5, 7]),
        seq=seq,
        acked_seq=dice.choice([seq - 1, seq - 1, seq - 2, 0, seq]),
        held=many(limit),
        returned=many(3 * limit),
        refund=many(limit),
        debt=dice.choice([0, 0, 0, many(3 * limit)]),
        waiting=tuple((dice.randint(1, 4), dice.randint(1, limit)) for _ in range(dice.choice([0, 0, 1, 2]))),
        target=many(2 * limit),
        is_reserve=dice.choice([0, 0, 1]),
        demand=dice.choice([0, 1000, 123_456, 10**9, dice.randint(0, 10**7)]),
        ttl=dice.choice([6_000_000, 30_000_000]),
    )


def perhaps_with_inflow(dice: random.Random, request: LeaseRequest, limit: int) -> LeaseRequest:
    """*request*, or what a process asks for that wants a part of the rate."""
    if dice.random() < 0.5:
        return request._replace(ttl=dice.choice([request.ttl, 456_000_000]))
    waiting = ((limit, 1),) if dice.random() < 0.3 else ()
    demand = dice.choice([1000, 1500, 50_000])
    return request._replace(inflow=1, is_reserve=0, target=limit, waiting=waiting, demand=demand, ttl=6_000_000)


def check_fields(server: Server, key: str, ledger: Ledger) -> None:
    kept = server.client().hgetall(key)
    assert ledger.params and kept["law"] == ledger.params.text
    for name in NUMBERS:
        assert float(kept[name]) == getattr(ledger, name), name
    assert float(kept["out"]) == ledger.leased_out
    assert int(kept["nodes"]) == len(ledger.nodes)
    assert int(kept.get("lost", 0)) == ledger.lost
    for name in ["free"] if ledger.params.kind == "bucket" else ["window", "current", "previous"]:
        assert float(kept[name]) == getattr(ledger, name), name
    records = {name[2:]: value for name, value in kept.items() if name.startswith("n:")}
    ours = {
        name: f"{r.lease_id}:{r.seq}:{r.leased_out}:{r.exp}:{r.demand}:{r.returned}:{r.granted}:{r.debt}"
        + (f":{r.room}:{r.inflow}" if r.inflow else "")
        for name, r in ledger.nodes.items()
    }
    assert int(kept.get("inflow", 0)) == ledger.inflow
    assert int(kept.get("late", 0)) == ledger.late
    assert records == ours
    assert server.client().pttl(key) > 0


@pytest.mark.parametrize("kind", QUOTAS)
@pytest.mark.parametrize("seed", range(3))
def test_ledger_and_script_agree(kind: str, seed: int, any_redis_server: Server) -> None:
    """Ledger and script give the same reply to every one of thousands of random steps, and keep the same fields."""
    dice = random.Random(f"{kind} {seed}")
    store = RedisStore(any_redis_server.url)
    for quota in QUOTAS[kind]:
        params, key = quota_params(Rule(quota, kind)), f"rate_limiter:twin:{{{kind}:{quota}}}"
        other = quota_params(Rule(QUOTAS[kind][0], kind))
        ledger, now = Ledger(), START
        seqs: dict[str, int] = {}
        lids: dict[str, int] = {}
        for step in range(60):
            now += dice.choice([0, 7, 1_500, 200_000, 1_000_000, 6_500_000, -3_000, -2_000_000, -40_000_000])
            params_now = other if dice.random() < 0.05 else params
            request, profile = some_request(dice, seqs, lids, params_now.limit), PROFILES[dice.choice(sorted(PROFILES))]
            request = perhaps_with_inflow(dice, request, params_now.limit)
            ours = ledger.sync(now, params_now, profile, request)
            [theirs] = script.replies(
                store.sync_executor().execute(
                    script.SYNC, script.call([LeaseCall(key, params_now, profile, request)], now)
                )
            )
            assert theirs == ours, f"step {step}: {request}"
            if ours.lease_id:
                lids[request.node] = ours.lease_id
            check_ledger(ledger)
        check_fields(any_redis_server, key, ledger)
    store.close()


def test_batch_order(redis_server: Server) -> None:
    """A batch is answered in the order of its keys."""
    store = RedisStore(redis_server.url)
    params, profile = quota_params(Rule("10/hour")), PROFILES["high"]
    requests = [LeaseCall(f"rate_limiter:{{{i}}}", params, profile, _need(i + 1)) for i in range(20)]
    found = _send(store, requests, START)
    assert [_reply(reply).free // params.cost for reply in found] == [
        max(10 - (i + 1), 0) if i < 10 else 10 for i in range(20)
    ]
    store.close()


def test_wrong_type_in_a_batch(redis_server: Server) -> None:
    """A key of another type leaves the other keys of the batch alone."""
    store = RedisStore(redis_server.url)
    redis_server.client().set("rate_limiter:{b}", "text")
    params, profile = quota_params(Rule("10/hour")), PROFILES["high"]
    first, second, third = _send(
        store, [LeaseCall(f"rate_limiter:{{{name}}}", params, profile, _need(1)) for name in "abc"], None
    )
    assert isinstance(second, str) and "WRONGTYPE" in second
    assert _reply(first).free_before == _reply(third).free_before == params.capacity_units
    store.close()


def test_server_clock(redis_server: Server) -> None:
    """Without a clock of the test the script uses the server's."""
    store = RedisStore(redis_server.url)
    params, profile = quota_params(Rule("10/hour")), PROFILES["high"]
    [reply] = _send(store, [LeaseCall("rate_limiter:{a}", params, profile, _need(10))], None)
    seconds, micro = redis_server.client().time()
    assert 0 <= seconds * 1_000_000 + micro - _reply(reply).lease_id < 60_000_000
    assert _reply(reply).wait <= 360_000_000
    ttl = redis_server.client().pttl("rate_limiter:{a}")
    assert 3_600_000 + 60_000 < ttl <= 3_600_000 + 92_000, "until it is full again, and no lease can be left"
    store.close()


def test_peek_writes_nothing(redis_server: Server) -> None:
    """A peek writes nothing."""
    store = RedisStore(redis_server.url)
    params, profile = quota_params(Rule("10/hour")), PROFILES["high"]
    [reply] = _send(
        store, [LeaseCall("rate_limiter:{a}", params, profile, _need(1)._replace(op="peek", waiting=()))], None
    )
    assert _reply(reply).free == params.capacity_units
    assert redis_server.names() == []
    store.close()


def test_constants() -> None:
    """Every placeholder of the script is filled in."""
    assert "@" not in script.SYNC.text


def _need(permits: int) -> LeaseRequest:
    return LeaseRequest("sync", "me", 0, 1, 0, 0, 0, 0, 0, ((1, permits),), 0, 0, 0, 6_000_000)


def _send(store: RedisStore, requests: Any, now: int | None) -> list[LeaseReply | str]:
    return script.replies(store.sync_executor().execute(script.SYNC, script.call(requests, now)))


def _reply(found: LeaseReply | str) -> LeaseReply:
    assert isinstance(found, LeaseReply)
    return found


def test_clock_step_with_many_nodes(redis_server: Server) -> None:
    """All their records change at once: more than Lua hands to one call."""
    store, key, many = RedisStore(redis_server.patient_url), "rate_limiter:{many}", 6000
    params, profile = quota_params(Rule("1000/hour")), PROFILES["high"]
    [first] = _send(store, [LeaseCall(key, params, profile, _need(1))], START)
    assert _reply(first).nodes == 1
    client = redis_server.client()
    record = next(value for name, value in client.hgetall(key).items() if name.startswith("n:"))
    client.hset(key, mapping={f"n:{number:016x}": record for number in range(many)} | {"nodes": many + 1})
    [reply] = _send(store, [LeaseCall(key, params, profile, _need(1)._replace(node="late"))], START - 5_000_000)
    assert _reply(reply).nodes == many + 2
    lives = [int(value.split(":")[3]) for name, value in client.hgetall(key).items() if name.startswith("n:")]
    assert len(lives) == many + 2 and max(lives) <= START - 5_000_000 + 30_000_000
    store.close()
