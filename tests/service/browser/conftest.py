"""One browser for all of these tests, a page for each."""

from collections.abc import Callable, Iterator

import pytest

from tests.service.browser.chromium import Chromium, Page
from tests.service.deploy import tools
from tests.support.service import Service

CHROMIUM = tools.PROGRAMS["chromium"].find()

Open = Callable[..., Page]


@pytest.fixture(scope="session")
def browser() -> Iterator[Chromium]:
    if CHROMIUM is None:
        pytest.skip(tools.missing_reason("chromium"))
    with Chromium(CHROMIUM) as browser:
        try:
            browser.ask("Browser.getVersion")
        except (RuntimeError, TimeoutError, BrokenPipeError) as error:
            pytest.skip(f"the chromium of this machine does not run: {error}")
        yield browser


@pytest.fixture
def look(browser: Chromium) -> Iterator[Open]:
    """Open pages of services, live; in the end nothing may have been complained about."""
    opened: list[Page] = []

    def at(service: Service, *, state: str = "live", **screen: object) -> Page:
        page = browser.open(**screen)
        opened.append(page)
        page.go(f"http://127.0.0.1:{service.port}/")
        page.until(f"document.querySelector('#status').dataset.state === '{state}'")
        return page

    yield at
    complaints = [complaint for page in opened for complaint in page.complaints()]
    for page in opened:
        page.close()
    assert complaints == []
