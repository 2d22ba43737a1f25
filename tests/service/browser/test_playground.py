"""The playground, in a real browser: it denies at the right moment, and says when to come back."""

import json
from collections.abc import Iterator

import pytest

from tests.service.browser.chromium import Page
from tests.service.browser.conftest import Open
from tests.support.service import Service, eventually

pytestmark = pytest.mark.xdist_group("browser")  # one browser, whatever the number of workers

ALGORITHMS = ["TOKEN_BUCKET", "LEAKY_BUCKET", "GCRA", "FIXED_WINDOW", "SLIDING_WINDOW", "SLIDING_WINDOW_COUNTER"]


def has(selector: str, text: str) -> str:
    return f"document.querySelector({json.dumps(selector)}).textContent === {json.dumps(text)}"


def tally(page: Page) -> tuple[int, int]:
    return int(page.text("#sent-allowed")), int(page.text("#sent-denied"))


def take(page: Page, algorithm: str, quota: str) -> None:
    """Choose a limit, and wait until the page stands ready with it."""
    page.click(f"input[value={algorithm}] + span")
    page.type("#quota", quota)
    limit = quota.split("/")[0] if "burst" not in quota else quota.split()[-1]
    page.until(has("#limit-text", f"of {limit} left"))
    page.until(has("#remaining", limit))


def send(page: Page, allowed: int, denied: int) -> None:
    """Click once, and wait for what must come of it."""
    page.click("#send")
    page.until(has("#sent-allowed", str(allowed)))
    page.until(has("#sent-denied", str(denied)))


def test_it_denies_the_fourth_of_three(service: Service, look: Open) -> None:
    page = look(service)
    page.type("#quota", "3/30d")
    for algorithm in ALGORITHMS:
        page.click(f"input[value={algorithm}] + span")
        page.until(has("#snippet", f'Limiter("3/30d", algorithm="{algorithm.lower()}")'))
        page.until(has("#limit-text", "of 3 left"))
        for allowed, left in ((1, "2"), (2, "1"), (3, "0")):
            send(page, allowed, 0)
            page.until(has("#remaining", left))
            assert page.text("#verdict") == "Allowed"
        send(page, 3, 1)
        page.until("document.querySelector('#verdict').textContent.startsWith('Denied. Next in ')")
        page.until("document.querySelectorAll('#trace .mark.denied').length === 1")
        assert page.value("document.querySelectorAll('#trace .mark.allowed').length") == 3
        assert page.value("document.querySelectorAll('#pips i').length") == 3
        assert page.value("document.querySelectorAll('#pips i.full').length") == 0


def test_after_the_countdown_it_allows(service: Service, look: Open) -> None:
    page = look(service)
    take(page, "TOKEN_BUCKET", "1/2s")
    page.press("#send")
    page.until("document.querySelector('#verdict').textContent.startsWith('Denied. Next in ')")
    page.release("#send")
    page.until(has("#verdict", "Go ahead."))
    page.until(has("#remaining", "1"))
    allowed, denied = tally(page)
    send(page, allowed + 1, denied)


def test_hold(service: Service, look: Open) -> None:
    """A held button keeps sending; letting go stops it."""
    page = look(service)
    take(page, "TOKEN_BUCKET", "5/30d")
    page.press("#send")
    page.until("Number(document.querySelector('#sent-denied').textContent) >= 2")
    page.release("#send")
    assert page.text("#sent-allowed") == "5"
    # What is still under way arrives; after that, several times the pace brings nothing.
    later = "new Promise(done => setTimeout(() => done(document.querySelector('#sent-denied').textContent), 400))"
    eventually(lambda: page.value(later) == page.value(later), "nothing is sent any more")


def test_keyboard(service: Service, look: Open) -> None:
    """The button works from the keyboard and by a click without a pointer."""
    page = look(service)
    take(page, "GCRA", "9/30d")
    page.value("document.querySelector('#send').focus()")
    page.key(" ", 32, " ")
    page.until(has("#sent-allowed", "1"))
    page.key("Enter", 13, "\r")
    page.until(has("#sent-allowed", "2"))
    page.value("document.querySelector('#send').click()")  # as assistive technology does
    page.until(has("#sent-allowed", "3"))
    assert "left" in page.text("#spoken") or "Allowed" in page.text("#spoken")


def test_bad_quota(service: Service, look: Open) -> None:
    """A bad quota is explained and can be corrected."""
    page = look(service)
    page.type("#quota", "lots/week")
    page.until("document.querySelector('#quota').getAttribute('aria-invalid') === 'true'")
    assert "lots/week" in page.text("#quota-problem")
    page.click("#send")
    assert tally(page) == (0, 0)
    page.click("#presets button:nth-child(2)")
    page.until(has("#limit-text", "of 20 left"))
    assert page.value("document.querySelector('#quota').getAttribute('aria-invalid')") is None
    assert page.text("#quota-problem") == ""


def test_starting_over_forgets(service: Service, look: Open) -> None:
    page = look(service)
    take(page, "FIXED_WINDOW", "2/30d")
    send(page, 1, 0)
    page.click("#again")
    page.until(has("#remaining", "2"))
    assert tally(page) == (0, 0)


def test_windows_have_no_burst(service: Service, look: Open) -> None:
    page = look(service)
    take(page, "TOKEN_BUCKET", "10/second burst 20")
    page.click("input[value=FIXED_WINDOW] + span")
    page.until(has("#limit-text", "of 10 left"))
    assert page.value("document.querySelector('#quota').value") == "10/second"


def test_nothing_of_it_is_counted(service: Service, look: Open) -> None:
    page = look(service)
    before = service.metrics()
    take(page, "LEAKY_BUCKET", "2/30d")
    send(page, 1, 0)
    after = service.metrics()
    name = 'rate_limiter_requests_total{algorithm="LEAKY_BUCKET",allowed="true"}'
    assert before[name] == after[name]


def test_all_six_can_be_compared(service: Service, look: Open) -> None:
    page = look(service)
    take(page, "TOKEN_BUCKET", "2/30d")
    page.click("#compare")
    page.until("document.querySelector('#lanes').checkVisibility()")
    for allowed, denied in ((1, 0), (2, 0), (2, 1)):
        send(page, allowed, denied)
    sums = "[...document.querySelectorAll('#lanes .sum')].map(sum => sum.textContent)"
    page.until(f"{sums}.every(text => text === '2 of 3')")
    page.until("document.querySelectorAll('#lanes .mark.denied').length === 6")

    page.type("#quota", "1/second burst 4")
    send(page, 1, 0)
    page.until(f"{sums}.join() === '1 of 1,1 of 1,1 of 1,no such quota,no such quota,no such quota'")


@pytest.fixture
def two_workers() -> Iterator[Service]:
    service = Service("--workers", "2")
    yield service
    service.forget()


def test_several_workers(service: Service, two_workers: Service, look: Open) -> None:
    """With several workers the page says that each counts for itself."""
    page = look(service)
    take(page, "GCRA", "7/30d")
    assert page.value("document.querySelector('#playground-note').checkVisibility()") is False
    page = look(two_workers)
    page.until("document.querySelector('#playground-note').checkVisibility()")
    assert "2 workers" in page.text("#playground-note")
