"""Batches: many at once do not delay other requests, and each check gets its own answer."""

from concurrent.futures import ThreadPoolExecutor

from headgate.service.batch import MAX_BATCHES
from tests.service.conftest import Start
from tests.support.service import API, Service

MANY = 24
CHECKS = 500
JSON = {"content-type": "application/json"}
RULE = '[rules.order]\nquotas = "1/day burst 20000"\n'


def left(service: Service) -> list[int]:
    """What each check of a batch was told is left: by that, which of all checks it was."""
    body = [{"key": "all", "rule": "order"}] * CHECKS
    answer = service.ask("POST", f"{API}/check/batch", body=body)
    assert answer.status == 200
    return [one["remaining"] for one in answer.json]


def test_batches_in_line(start: Start) -> None:
    """A few batches are decided at a time, the others wait in line."""
    service = start(config=RULE)
    with ThreadPoolExecutor(MANY) as threads:
        found = list(threads.map(lambda _: left(service), range(MANY)))
    every = sorted((number for batch in found for number in batch), reverse=True)
    assert every == list(range(19_999, 19_999 - MANY * CHECKS, -1)), "each was spent once"
    for batch in found:
        assert batch == sorted(batch, reverse=True), "in order"
        between = batch[0] - batch[-1]  # checks decided from its first to its last, its own and others'
        assert between < (MAX_BATCHES + 1) * CHECKS, "others were decided in the meantime, and that is too many"


def test_refused_batch(start: Start) -> None:
    """A refused batch leaves its place to the next."""
    service = start(config=RULE)
    for body in (b"{}", b'[{"rule": "none"}]', b'[{"permits": 1000000000}]'):
        for _ in range(MAX_BATCHES):
            assert service.ask("POST", f"{API}/check/batch", None, body, JSON).status == 400
    assert len(left(service)) == CHECKS


def test_unanswered_check(start: Start) -> None:
    """A check without a decision takes no other check's answer away."""
    rules = "[rules.strict]\nquotas = '5/day'\non_store_error = 'raise'\n"
    rules += "[rules.spent]\nquotas = '5/day'\non_store_error = 'local'\n"
    service = start("--store", "redis://127.0.0.1:1/0", config=rules)
    checks = [{"key": "k", "rule": rule} for rule in ("spent", "strict", "spent")] * 40  # more than one trip
    answer = service.ask("POST", f"{API}/check/batch", body=checks)
    assert answer.status == 200
    assert [one["rule"] for one in answer.json] == [check["rule"] for check in checks]
    spent = [one for one in answer.json if one["rule"] == "spent"]
    assert [one["allowed"] for one in spent] == [True] * 5 + [False] * 75, "each was spent once, and says so"
    for one in (one for one in answer.json if one["rule"] == "strict"):
        assert one["allowed"] is False and one["unanswered"] is True and one["retryAfterSeconds"] == 1
        assert one["key"] == "k" and one["limit"] == 5 and "does not answer" in one["message"]
    assert all("unanswered" not in one for one in spent)
    name = 'rate_limiter_unanswered_total{rule="strict",algorithm="TOKEN_BUCKET"}'
    assert service.metrics()[name] == 40


def test_unanswered_batch(start: Start) -> None:
    """A batch in which no check got a decision is a 503."""
    service = start("--store", "redis://127.0.0.1:1/0", config="[rules.default]\non_store_error = 'raise'\n")
    answer = service.ask("POST", f"{API}/check/batch", body=[{"key": "a"}, {"key": "b"}])
    assert answer.status == 503 and answer.headers["retry-after"] == "1" and "try again" in answer.problem
