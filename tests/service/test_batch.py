"""Many batches at once: each is decided soon after it is begun, and nobody's check waits for all of them."""

from concurrent.futures import ThreadPoolExecutor

from headgate.service.batch import AT_ONCE
from tests.service.conftest import Start
from tests.service.running import API, Service

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


def test_a_few_are_decided_at_a_time_and_the_rest_stand_in_line(start: Start) -> None:
    service = start(config=RULE)
    with ThreadPoolExecutor(MANY) as threads:
        found = list(threads.map(lambda _: left(service), range(MANY)))
    every = sorted((number for batch in found for number in batch), reverse=True)
    assert every == list(range(19_999, 19_999 - MANY * CHECKS, -1)), "each was spent once"
    for batch in found:
        assert batch == sorted(batch, reverse=True), "in order"
        between = batch[0] - batch[-1]  # checks decided from its first to its last, its own and others'
        assert between < (AT_ONCE + 1) * CHECKS, "others were decided in the meantime, and that is too many"


def test_one_that_is_refused_holds_nobody_up(start: Start) -> None:
    service = start(config=RULE)
    for body in (b"[]", b"{}", b'[{"rule": "none"}]', b'[{"permits": 1000000000}]'):
        for _ in range(AT_ONCE):
            assert service.ask("POST", f"{API}/check/batch", None, body, JSON).status == 400
    assert len(left(service)) == CHECKS
