"""Envoy's rate limits: which rule a descriptor meets, and what the descriptors of a call decide together."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.errors import StoreUnavailable
from headgate.service.envoy_limits import MAX_OVERRIDES, BadRateLimitRequest, label_text
from headgate.service.envoy_rules import EnvoyRules
from headgate.service.envoy_settings import entry_text
from headgate.service.envoy_tree import counter_key, matches
from headgate.service.rls_messages import MAX_UINT32, OK, OVER_LIMIT, Descriptor, RateLimitRequest
from headgate.stores.memory import MemoryStore
from headgate.stores.redis import RedisStore
from tests.support.envoy import Calls, Entries, shown
from tests.support.servers import Server, free_port

TENANTS = """
domain: shop
descriptors:
  - key: tenant
    rate_limit: {unit: minute, requests_per_unit: 100}
  - key: tenant
    value: acme
    rate_limit: {unit: minute, requests_per_unit: 500}
  - key: tenant
    value: gold-*
    rate_limit: {unit: minute, requests_per_unit: 5000}
  - key: tenant
    value: "*-test"
    rate_limit: {unit: second, requests_per_unit: 7}
  - key: tenant
    value: gold-x*
    rate_limit: {unit: minute, requests_per_unit: 1}
  - key: route
    rate_limit: {unit: minute, requests_per_unit: 30}
  - key: route
    value: /login
    rate_limit: {unit: minute, requests_per_unit: 20}
    descriptors:
      - key: ip
        rate_limit: {unit: minute, requests_per_unit: 5}
  - key: route
    value: /health
  - key: path
    value: /api/*/x/*/y
    rate_limit: {unit: minute, requests_per_unit: 9}
"""


@pytest.mark.parametrize(
    ("entries", "limit"),
    [
        ([("tenant", "acme")], 500),
        ([("tenant", "gold-x1")], 5000),  # the first pattern in the file
        ([("tenant", "gold-")], 5000),
        ([("tenant", "a-test")], 7),
        ([("tenant", "gold-test")], 5000),
        ([("tenant", "gold-x*")], 1),  # written as the rule is
        ([("tenant", "")], 100),
        ([("tenant", "ACME")], 100),
        ([("Tenant", "acme")], None),
        ([("route", "/login")], 20),
        ([("route", "/login"), ("ip", "192.0.2.1")], 5),
        ([("ip", "192.0.2.1"), ("route", "/login")], None),  # the order matters
        ([("route", "/login"), ("ip", "192.0.2.1"), ("more", "1")], None),  # one too many
        ([("route", "/other"), ("ip", "192.0.2.1")], None),
        ([("route", "/login"), ("other", "u")], None),  # no way back to the key alone
        ([("route", "/health")], None),  # an allow-list
        ([("route", "/elsewhere")], 30),
        ([("path", "/api//x//y")], 9),
        ([("path", "/api/1/x/2/y")], 9),
        ([("path", "/api/1/x/y")], None),
        ([("tenant_acme", "")], None),  # keys and values are not run together
        ([], None),
    ],
    ids=str,
)
def test_matching(entries: Entries, limit: int | None) -> None:
    """A descriptor meets the rule of envoyproxy/ratelimit, or none."""
    [status] = Calls(TENANTS).answer(entries).statuses
    assert (status.limit and status.limit[1]) == limit
    assert status.remaining == (limit - 1 if limit else 0)


@pytest.mark.parametrize(
    ("pattern", "value", "fits"),
    [
        ("*", "", True),
        ("*", "anything", True),
        ("a*", "a", True),
        ("a*", "ba", False),
        ("*a", "ba", True),
        ("a*a", "a", False),  # one letter cannot be both ends
        ("a*a", "aa", True),
        ("a*b*c", "abc", True),
        ("a*b*c", "ac", False),
        ("a*bb*b", "abb", False),
        ("a**c", "ac", True),
        ("a*b*a", "aba", True),
        ("a*ba*a", "aba", False),
    ],
)
def test_patterns(pattern: str, value: str, fits: bool) -> None:
    """A star is any text, or none."""
    assert matches(pattern.split("*"), value) is fits


@given(st.lists(st.sampled_from("ab"), max_size=6), st.lists(st.sampled_from("ab*"), max_size=6))
def test_every_pattern(value: list[str], pattern: list[str]) -> None:
    """The search finds what a comparison letter by letter finds."""

    def slow(pattern: str, value: str) -> bool:
        if not pattern:
            return not value
        if pattern[0] == "*":
            return slow(pattern[1:], value) or bool(value and slow(pattern, value[1:]))
        return bool(value) and pattern[0] == value[0] and slow(pattern[1:], value[1:])

    if "*" in pattern:
        assert matches("".join(pattern).split("*"), "".join(value)) is slow("".join(pattern), "".join(value))


@given(
    st.lists(st.tuples(st.text("a=|%\n", max_size=3), st.text("a=|%\n", max_size=3)), min_size=1, max_size=3),
    st.lists(st.tuples(st.text("a=|%\n", max_size=3), st.text("a=|%\n", max_size=3)), min_size=1, max_size=3),
)
def test_counter_keys_are_unambiguous(one: Entries, other: Entries) -> None:
    """Two descriptors have the same counter if and only if they are equal."""
    assert (counter_key(one) == counter_key(other)) is (one == other)
    assert counter_key(one).isprintable()


def test_long_keys() -> None:
    """A key that is too long for the store is digested, and not mixed with others."""
    long = [("path", "/" + "x" * 300)]
    assert len(counter_key(long)) <= 256 and counter_key(long) != counter_key([("path", "/" + "x" * 301)])
    assert counter_key([("a", "b"), ("c", "d e")]) == "a=b|c=d e"
    assert len(counter_key([("k", "ü" * 127)])) == 129  # 256 bytes
    assert len(counter_key([("k", "ü" * 128)])) == 22
    calls = Calls("domain: d\ndescriptors: [{key: path, rate_limit: {unit: hour, requests_per_unit: 1}}]")
    assert calls(long) == "OK: OK 0" and calls(long) == "OVER: OVER 0"
    assert calls([("path", "/" + "x" * 301)]) == "OK: OK 0"
    assert calls([("path", "line\nbreak")]) == "OK: OK 0"


LIMITS = """
domain: d
descriptors:
  - {key: none, rate_limit: {unit: hour, requests_per_unit: 0}}
  - {key: missing, rate_limit: {unit: hour}}
  - {key: free, rate_limit: {unlimited: true}}
  - {key: three, rate_limit: {name: third, unit: minute, requests_per_unit: 3}}
  - {key: ten, rate_limit: {unit: minute, requests_per_unit: 10}}
  - {key: wide, rate_limit: {unit: hour, requests_per_unit: 4294967295}}
  - {key: trial, shadow_mode: true, rate_limit: {unit: minute, requests_per_unit: 2}}
  - {key: q1, quota_mode: true, rate_limit: {unit: minute, requests_per_unit: 1}}
  - {key: q2, quota_mode: true, rate_limit: {unit: minute, requests_per_unit: 2}}
  - {key: pool, value: "gold-*", share_threshold: true, rate_limit: {unit: minute, requests_per_unit: 2}}
  - {key: apart, value: "gold-*", rate_limit: {unit: minute, requests_per_unit: 2}}
  - key: files
    value: "a/*"
    share_threshold: true
    descriptors:
      - {key: user, rate_limit: {unit: minute, requests_per_unit: 1}}
  - {key: instead, rate_limit: {unit: minute, requests_per_unit: 5, replaces: [{name: third}]}}
  - {key: free_instead, rate_limit: {unlimited: true, replaces: [{name: third}]}}
"""
NO: Entries = [("unknown", "x")]


def d(key: str, value: str = "v", hits: int | None = None, limit: tuple[int, int] | None = None) -> Descriptor:
    return Descriptor([(key, value)], limit, hits)


def test_nothing_passes() -> None:
    """A limit of 0, or without a number, is always over, for a look too."""
    calls = Calls(LIMITS)
    assert calls(d("none")) == calls(d("missing")) == calls(d("none", hits=0)) == "OVER: OVER 0"
    assert calls.answer(d("none")).statuses[0].limit == ("", 0, 3)


def test_unlimited() -> None:
    """An unlimited rule is OK with the largest number, and no limit."""
    [status] = Calls(LIMITS).answer(d("free"), hits=1 << 31).statuses
    assert (status.code, status.limit, status.remaining, status.reset_seconds) == (OK, None, MAX_UINT32, None)


def test_the_largest_limit() -> None:
    """A limit above a billion is reported as it is written."""
    [status] = Calls(LIMITS).answer(d("wide")).statuses
    assert status.limit == ("", MAX_UINT32, 3) and status.remaining == MAX_UINT32 - 1


def test_shared_threshold() -> None:
    """Values that a pattern with share_threshold matches share a counter, on every level; others do not."""
    calls = Calls(LIMITS)
    assert [calls(d("pool", f"gold-{i}")) for i in range(3)] == ["OK: OK 1", "OK: OK 0", "OVER: OVER 0"]
    assert [calls(d("apart", f"gold-{i}")) for i in range(3)] == ["OK: OK 1"] * 3
    assert calls([("files", "a/1"), ("user", "u")]) == "OK: OK 0"
    assert calls([("files", "a/2"), ("user", "u")]) == "OVER: OVER 0"
    assert calls([("files", "a/2"), ("user", "w")]) == "OK: OK 0"


def test_limit_in_the_request() -> None:
    """A limit in the request replaces that of the rule, its name and its shadow_mode; the domain must be known."""
    calls = Calls(LIMITS)
    two = d("trial", limit=(2, 2))
    assert [calls(two) for _ in range(3)] == ["OK: OK 1", "OK: OK 0", "OVER: OVER 0"]
    assert calls.answer(d("three", limit=(7, 1))).statuses[0].limit == ("", 7, 1)
    assert calls(d("nosuch", limit=(2, 2))) == "OK: OK 1"
    assert calls(d("x", limit=(0, 2))) == "OVER: OVER 0"
    assert calls(Descriptor([], (2, 2))) == "OK: OK 1"
    assert calls(two, domain="other") == "OK: OK -"
    with pytest.raises(BadRateLimitRequest, match="second, minute, hour, day, month, year, week, got the number 9"):
        calls(d("three", limit=(7, 9)))


def test_limits_in_requests_are_bounded() -> None:
    """The limits that come with requests do not fill the memory, and one that is in use is kept."""
    calls = Calls(LIMITS)
    assert calls(d("x", limit=(1, 3))) == "OK: OK 0"
    for i in range(2 * MAX_OVERRIDES):
        assert calls(d("x", limit=(i + 2, 3)))[:2] == "OK"
        if i % 500 == 0:
            assert calls(d("x", limit=(1, 3))) == "OVER: OVER 0"
    assert isinstance(calls.store, MemoryStore)
    assert len(calls.store.tables) <= MAX_OVERRIDES + 20 and len(calls.store) <= MAX_OVERRIDES + 20
    assert calls.store.key_count.keys == len(calls.store)


def test_replaces() -> None:
    """A rule that another of the same call replaces has no limit in this call, and is not counted."""
    calls = Calls(LIMITS)
    assert calls(d("three"), d("instead")) == "OK: OK -, OK 4"
    assert calls(d("instead"), d("three")) == "OK: OK 3, OK -"
    assert calls(d("free_instead"), d("three")) == f"OK: OK {MAX_UINT32}, OK -"
    assert calls(d("three")) == "OK: OK 2"
    assert calls(d("three", limit=(5, 2)), d("instead")) == "OK: OK 4, OK 2", "a limit of the request has no name"


def test_shadow_mode() -> None:
    """A rule in shadow_mode counts, and is OK with nothing remaining when it is over; others go on."""
    calls = Calls(LIMITS)
    found = [calls(d("trial"), d("ten")) for _ in range(4)]
    assert found == ["OK: OK 1, OK 9", "OK: OK 0, OK 8", "OK: OK 0, OK 7", "OK: OK 0, OK 6"]
    assert calls(d("trial", "w", hits=5)) == "OK: OK 0"
    assert calls(d("trial", "x"), hits=5) == "OK: OK 0", "also when more was asked for than remains"


def test_shadow_of_all() -> None:
    """shadow = true in the settings puts every rule into shadow_mode."""
    calls = Calls(LIMITS, settings="shadow = true")
    assert [calls(d("q1")) for _ in range(2)] == ["OK: OK 0"] * 2
    assert calls(d("none")) == "OK: OK 0"


def test_quota_mode() -> None:
    """Rules in quota_mode refuse a call only if all of them are over; one that is over is not counted."""
    calls = Calls(LIMITS)
    found = [calls(d("q1"), d("q2"), d("ten")) for _ in range(3)]
    assert found == ["OK: OK 0, OK 1, OK 9", "OK: OVER 0, OK 0, OK 8", "OVER: OVER 0, OVER 0, OK 8"]
    assert calls(d("q1")) == "OVER: OVER 0"
    assert calls(d("ten"), d("q1", "w")) == "OK: OK 7, OK 0"


def test_hits() -> None:
    """A descriptor's own hits count, else those of the request, else 1; 0 hits of a request are 1."""
    calls = Calls(LIMITS)
    assert calls(d("ten")) == "OK: OK 9"
    assert calls(d("ten"), hits=3) == "OK: OK 6"
    assert calls(d("ten", hits=2), hits=3) == "OK: OK 4"
    assert calls(d("ten", hits=0), hits=3) == "OK: OK 4"
    assert calls(d("ten", hits=4)) == "OK: OK 0"
    assert calls(d("ten", hits=0)) == "OVER: OVER 0", "a look is over when nothing remains"


def test_a_look_refuses_for_all() -> None:
    """When a look is over, the other descriptors of the call are not counted."""
    calls = Calls(LIMITS)
    assert calls(d("three", hits=3)) == "OK: OK 0"
    assert calls(d("ten"), d("three", hits=0)) == "OVER: OK 10, OVER 0"
    assert calls(d("ten")) == "OK: OK 9"


def test_all_or_nothing() -> None:
    """When one descriptor is over, none is counted."""
    calls = Calls(LIMITS)
    assert [calls(d("three"), d("ten")) for _ in range(3)][-1] == "OK: OK 0, OK 7"
    assert calls(d("ten"), d("three")) == "OVER: OK 7, OVER 0"
    assert calls(d("ten")) == "OK: OK 6"
    assert calls(d("ten"), hits=7) == "OVER: OVER 6", "and nothing is spent of a limit that has less than is asked"
    assert calls(d("ten"), hits=6) == "OK: OK 0"


def test_one_descriptor_twice() -> None:
    """Equal descriptors add up."""
    calls = Calls(LIMITS)
    assert calls(d("three"), d("three")) == "OK: OK 1, OK 1"
    assert calls(d("three"), d("three")) == "OVER: OVER 1, OVER 1"
    assert calls(d("three", "w"), d("three", "w"), hits=2) == "OVER: OVER 3, OVER 3", "more than could ever be had"


def test_counting_each() -> None:
    """counting = "each" is that of envoyproxy/ratelimit: a descriptor counts also when another is over."""
    calls = Calls(LIMITS, settings='counting = "each"')
    assert [calls(d("three"), d("ten")) for _ in range(4)][-1] == "OVER: OVER 0, OK 6"
    assert calls(d("ten"), hits=7) == "OVER: OVER 0", "what is asked for above the limit counts, too"
    assert calls(d("q1"), d("q2")) == "OK: OK 0, OK 1"
    assert calls(d("trial", hits=9), d("three", "w", hits=0)) == "OK: OK 0, OK 3"
    assert calls(d("three", "w", hits=99)) == "OVER: OVER 0"
    assert calls(d("three", "w", hits=0)) == "OVER: OVER 0"


def test_costs_after_the_fact() -> None:
    """A client that looks before the work and charges its cost afterwards is limited in the end."""
    calls = Calls(LIMITS)
    charged = []
    for cost in (4, 4, 4, 4):
        if calls(d("ten", hits=0)).startswith("OVER"):
            break
        charged.append(calls(d("ten", hits=cost)))
    assert charged == ["OK: OK 6", "OK: OK 2", "OVER: OVER 0"]
    assert calls(d("three", hits=50), d("ten", "w")) == "OVER: OVER 0, OK 10", "a cost above the limit takes all of it"
    assert calls(d("three", hits=0)) == "OVER: OVER 0"


def test_costs_that_do_not_drain() -> None:
    """drain = false in the table of a rule, or of its domain, keeps what remains for a smaller call."""
    for name in ("d/ten", "d"):
        calls = Calls(LIMITS, settings=f'[envoy.rules."{name}"]\ndrain = false')
        assert calls(d("ten", hits=8)) == "OK: OK 2"
        assert calls(d("ten", hits=8)) == "OVER: OVER 2"
        assert calls(d("ten", hits=2)) == "OK: OK 0"


@pytest.mark.parametrize(
    ("unit", "number", "seconds"),
    [
        ("second", 1, 1),
        ("MINUTE", 2, 60),
        ("hour", 3, 3600),
        ("day", 4, 86400),
        ("week", 7, 7 * 86400),
        ("month", 5, 30 * 86400),
        ("Year", 6, 365 * 86400),
    ],
)
def test_reset(unit: str, number: int, seconds: int) -> None:
    """Windows begin at multiples of the unit since the epoch; a status says when the next begins."""
    calls = Calls(f"domain: d\ndescriptors: [{{key: a, rate_limit: {{unit: {unit}, requests_per_unit: 1}}}}]")
    now = 1_699_920_000
    for hits in (None, None, 0):
        [status] = calls.answer(d("a", hits=hits)).statuses
        assert (status.limit, status.reset_seconds) == (("", 1, number), seconds - now % seconds)
    assert status.code == OVER_LIMIT
    calls.clock.advance(seconds - now % seconds - 0.000001)
    assert calls.answer(d("a")).statuses[0].reset_seconds == 1
    calls.clock.advance(0.000001)
    assert calls(d("a")) == "OK: OK 0"


def test_calls_that_cannot_be_decided() -> None:
    """An unknown domain is OK; an empty domain and no descriptors are errors."""
    calls = Calls(LIMITS)
    assert calls(d("three"), d("none"), domain="elsewhere") == "OK: OK -, OK -"
    assert calls(NO) == "OK: OK -"
    with pytest.raises(BadRateLimitRequest, match="the domain is empty"):
        calls.rules.decide_now(RateLimitRequest("", [d("three")]))
    with pytest.raises(BadRateLimitRequest, match="no descriptors"):
        calls.rules.decide_now(RateLimitRequest("d", []))


def test_domains_are_apart() -> None:
    """Equal descriptors of two domains have two counters."""
    text = "domain: {}\ndescriptors: [{{key: a, rate_limit: {{unit: hour, requests_per_unit: {}}}}}]"
    calls = Calls(text.format("one", 1), text.format("two", 1), text.format("one/two", 1))
    assert [calls(d("a"), domain=name) for name in ("one", "two", "one/two", "one")] == [
        *["OK: OK 0"] * 3,
        "OVER: OVER 0",
    ]


def test_algorithms() -> None:
    """A rule, a domain or all rules may use any algorithm, and quotas that the YAML cannot express."""
    six = "rate_limit: {unit: minute, requests_per_unit: 6}"
    own = '[envoy.rules."d/a"]\nalgorithm = "token_bucket"\nquotas = ["1/second burst 3", "5/hour"]'
    text = f"domain: d\ndescriptors: [{{key: a, {six}}}, {{key: b, {six}}}]"
    calls = Calls(text, settings=f'algorithm = "GCRA"\n{own}')
    assert [calls(d("a"))[:4] for _ in range(4)] == ["OK: ", "OK: ", "OK: ", "OVER"]
    calls.clock.advance(1)
    assert calls(d("a")) == "OK: OK 0"
    assert calls.answer(d("a")).statuses[0].limit == ("", 1, 1)
    assert [calls(d("b"), hits=6), calls(d("b"))] == ["OK: OK 0", "OVER: OVER 0"]
    [status] = calls.answer(d("b")).statuses
    assert (status.limit, status.reset_seconds) == (("", 6, 2), 10), (
        "when the next one passes, not when the window ends"
    )
    calls.clock.advance(10)
    assert calls(d("b")) == "OK: OK 0"


def test_headers() -> None:
    """headers = true gives the client the tightest limit, and the time to come back when it is over."""
    calls = Calls(LIMITS, settings="headers = true")
    limits = {"RateLimit-Limit": "3", "RateLimit-Remaining": "2", "RateLimit-Reset": "60"}
    assert dict(calls.answer(d("ten"), d("three")).headers) == limits
    calls(d("three"), hits=2)
    over = dict(calls.answer(d("ten"), d("three")).headers)
    assert over == limits | {"RateLimit-Remaining": "0", "Retry-After": "60"}
    assert calls.answer(NO).headers == calls.answer(d("free")).headers == []
    assert Calls(LIMITS).answer(d("three")).headers == []


@pytest.mark.parametrize("key", ["three", "ten", "none", "free", "nosuch"])
def test_the_short_way(key: str) -> None:
    """One hit of one descriptor is decided as by the plan that decides several."""
    short, long = Calls(LIMITS), Calls(LIMITS, settings="headers = true")  # with headers there is no short way
    for _ in range(12):
        assert short(d(key)) == long(d(key))
        assert shown(short.answer(d(key), NO)) == shown(long.answer(d(key), NO))


def test_labels() -> None:
    """The name of a rule is a label without quotes or spaces, of bounded length, and the same for no two rules."""
    assert label_text("shop/route=/login|ip") == "shop/route=/login|ip"
    assert label_text('a/b="c d"\\') == "a/b=%22c%20d%22%5C"
    long = [label_text("d/" + "x" * 150 + end) for end in "ab"]
    assert long[0] != long[1] and all(len(text) <= 100 for text in long)
    assert entry_text("k", "a|b%") == "k=a%7Cb%25" and entry_text("a=b", None) == "a%3Db"


REQUESTS = [
    RateLimitRequest("d", [d("three"), d("ten"), d("trial"), d("q1"), d("q2"), d("free")], 1),
    RateLimitRequest("d", [d("three"), d("ten", hits=7), d("ten", "w", hits=0)]),
    RateLimitRequest("d", [d("three"), d("three")], 2),
    RateLimitRequest("d", [d("plan", limit=(2, 2)), d("ten", "v")]),
    RateLimitRequest("elsewhere", [d("three")]),
]


@pytest.mark.parametrize("counting", ["all_or_nothing", "each"])
async def test_awaited_on_another_store(counting: str) -> None:
    """On a store that needs a round trip, decide_now gives nothing, and decide answers the same."""
    now = Calls(LIMITS, settings=f'counting = "{counting}"')
    store = MemoryStore(clock=now.clock)
    store.in_process = False  # as if it needed a round trip
    later = Calls(LIMITS, settings=f'counting = "{counting}"', store=store)
    for request in REQUESTS:
        for timeout in (None, 0.02, 0.02, 5.0):
            expected = now.rules.decide_now(request)
            assert expected is not None and later.rules.decide_now(request) is None
            assert shown(await later.rules.decide(request, timeout)) == shown(expected)


@pytest.mark.parametrize("counting", ["all_or_nothing", "each"])
async def test_on_redis(counting: str, redis_server: Server, within_a_minute: None) -> None:
    """On Redis every call is answered as in memory."""
    now = Calls(LIMITS, settings=f'counting = "{counting}"')
    store = RedisStore(redis_server.url)
    later = Calls(LIMITS, settings=f'counting = "{counting}"', store=store)
    for request in REQUESTS:
        for timeout in (None, 20.0, None, 20.0):
            expected = now.rules.decide_now(request)
            assert expected is not None
            assert shown(await later.rules.decide(request, timeout)) == shown(expected)
    await store.aclose()


@pytest.mark.parametrize(
    ("policy", "answer"), [("allow", "OK: OK 2, OK 9"), ("deny", "OVER: OVER 0, OVER 0"), ("local", "OK: OK 2, OK 9")]
)
async def test_without_the_store(policy: str, answer: str) -> None:
    """Without its store a call is answered by on_store_error of [envoy]."""
    store = RedisStore(f"redis://127.0.0.1:{free_port()}/0?timeout=0.2")
    calls = Calls(LIMITS, settings=f'on_store_error = "{policy}"', store=store)
    request = RateLimitRequest("d", [d("three"), d("ten")])
    assert shown(await calls.rules.decide(request, 0.05)) == answer
    await store.aclose()


async def test_without_the_store_and_a_policy() -> None:
    """on_store_error = "raise" raises, so that Envoy is told by a status and not by a code."""
    store = RedisStore(f"redis://127.0.0.1:{free_port()}/0?timeout=0.2")
    calls = Calls(LIMITS, settings='on_store_error = "raise"', store=store)
    for descriptors in ([d("three")], [d("three"), d("ten")], [d("three", hits=0)]):
        with pytest.raises(StoreUnavailable):
            await calls.rules.decide(RateLimitRequest("d", descriptors), 0.05)
    await store.aclose()


def test_store_errors_are_raised() -> None:
    """With on_store_error = "raise" a call without an answer is an error, never a code."""
    calls = Calls(LIMITS, settings='on_store_error = "raise"')
    rules = EnvoyRules(calls.domains, calls.settings, calls.store)

    def fail(key: str, permits: int) -> Any:
        raise StoreUnavailable("gone")

    found = rules.domains["d"].find([("three", "v")])
    assert found is not None
    found[0].take_now = fail
    for request in (RateLimitRequest("d", [d("three")]), RateLimitRequest("d", [d("three"), Descriptor(NO)])):
        with pytest.raises(StoreUnavailable):
            rules.decide_now(request)
