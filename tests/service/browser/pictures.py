"""Draw the documentation's pictures of the live page: a real service with some traffic, in a real browser.

python -m tests.service.browser.pictures        writes docs/img/page*.webp, in about a minute
"""

import random
import threading
import time

from tests.service.browser.chromium import Chromium, Page
from tests.service.deploy import tools
from tests.support.servers import KINDS, Server
from tests.support.service import Service

IMAGES = tools.HOUSE / "docs" / "img"
WATCHED = 75.0  # seconds of traffic on the charts
RULES = """
[rules.login]
quotas = "20/10s"
algorithm = "sliding_window_counter"
[rules.search]
quotas = "25/second burst 60"
[rules.export]
quotas = "3/second burst 6"
algorithm = "leaky_bucket"
[rules.tenant]
quotas = "1000/second"
hybrid = true
"""
# rule, calls a second, how many callers
CALLERS = [("search", 60.0, 3), ("login", 6.0, 4), ("export", 5.0, 2), ("tenant", 40.0, 3), ("default", 30.0, 9)]


def call(service: Service, rule: str, rate: float, callers: int, stop: threading.Event) -> None:
    """Ask again and again, in waves, so that there is something to see."""
    connection = service.connect()
    dice = random.Random(rule)
    began = time.monotonic()
    while not stop.is_set():
        wave = 1.0 + 0.8 * ((time.monotonic() - began) % 23.0 > 14.0)
        key = f"{rule}-client-{min(dice.randrange(callers), dice.randrange(callers))}"
        service.on(connection, "GET", "/api/v1/rate-limit/check", {"key": key, "rule": rule})
        stop.wait(dice.expovariate(rate * wave))
    connection.close()


def play(page: Page) -> None:
    """Use the playground, so that its picture shows a burst, denials and a refill."""
    page.click("#compare")
    page.type("#pace", "5")
    for held, rest in ((2.0, 5.0), (0.1, 0.6), (0.1, 0.6), (3.0, 4.0), (1.5, 0.0)):
        page.press("#send")
        time.sleep(held)
        page.release("#send")
        time.sleep(rest)


def main() -> None:
    chromium = tools.PROGRAMS["chromium"].find()
    if chromium is None:
        raise SystemExit(tools.missing_reason("chromium"))
    redis, stop = Server(KINDS[0]), threading.Event()
    service = Service("--store", redis.bare_url, "--resp-port", "0", config=RULES)
    threads = [threading.Thread(target=call, args=(service, *caller, stop)) for caller in CALLERS]
    screens = {
        "page": {"height": 1000},
        "page-dark": {"height": 1000, "dark": True},
        "page-phone": {"width": 390, "height": 844, "phone": True},
    }
    try:
        with Chromium(chromium) as browser:
            pages = {name: browser.open(**screen) for name, screen in screens.items()}
            for page in pages.values():
                page.go(f"http://127.0.0.1:{service.port}/")
            for thread in threads:
                thread.start()
            time.sleep(WATCHED)
            for name, page in pages.items():
                page.ask("Page.bringToFront")  # a page in the background does not draw
                play(page)
                page.value("scrollTo(0, 0)")
                page.picture(IMAGES / f"{name}.webp")
                print(f"docs/img/{name}.webp", page.complaints() or "")
    finally:
        stop.set()
        for thread in threads:
            if thread.is_alive():
                thread.join()
        service.forget()
        redis.stop()


if __name__ == "__main__":
    main()
