"""The live half of the page, in a real browser, of a real service."""

import json
import sys
from pathlib import Path

import pytest

from tests.service.browser.chromium import Page
from tests.service.browser.conftest import Open
from tests.service.conftest import Start
from tests.service.deploy.processes import running
from tests.support.servers import Server
from tests.support.service import API, Service

pytestmark = pytest.mark.xdist_group("browser")  # one browser, whatever the number of workers

HOSTILE = "<img src=x onerror=document.title='owned'>"
DRAWN = "document.querySelector('#decisions path.line.denied')?.getAttribute('d')"
RULES = """
[rules.login]
quotas = "3/hour"
algorithm = "sliding_window"
"""


def shown(selector: str) -> str:
    return f"document.querySelector({json.dumps(selector)}).checkVisibility()"


def rules(page: Page) -> list[list[str]]:
    found: list[list[str]] = page.value(
        "[...document.querySelectorAll('#rules .rule:not(.heads)')]"
        ".map(row => [...row.querySelectorAll('b, small')].map(cell => cell.textContent))"
    )
    return found


def test_charts_move_with_the_traffic(start: Start, look: Open) -> None:
    service = start(config=RULES)
    page = look(service)
    assert page.value(shown("#no-decisions")), "nothing has happened yet, and the page says so"
    assert f"http://127.0.0.1:{service.port}{API}/check" in page.text("#first-check")

    for _ in range(7):
        service.check("somebody", rule="login")
    page.until("document.querySelector('#rules .rule .share')?.textContent.startsWith('57')")  # 4 of 7
    assert not page.value(shown("#no-decisions"))
    assert rules(page) == [["login", "sliding window"]]
    before = page.until(DRAWN)
    page.until(f"{DRAWN} !== {json.dumps(before)}")

    service.check("somebody", algorithm="GCRA")
    page.until("document.querySelectorAll('#rules .rule').length === 3")
    assert ["default", "gcra"] in rules(page)
    page.until("document.querySelector('#latency path.line.p99') !== null")
    assert page.text("#now-p50").endswith(("µs", "ms")) and page.text("#now-p99").endswith(("µs", "ms", "s"))
    assert page.text("#store-state") == "Healthy" and page.text("#store-note") == "memory"


def test_first_requests(start: Start, look: Open) -> None:
    """The page itself can send the first ten requests."""
    service = start()
    page = look(service)
    page.click("#send-some")
    page.until("document.querySelector('#send-some-note').textContent === 'Sent.'")
    page.until("document.querySelectorAll('#rules .rule').length === 2")
    assert service.metrics()['rate_limiter_requests_total{algorithm="TOKEN_BUCKET",allowed="true"}'] == 10


def test_keys_are_for_the_admin(start: Start, look: Open) -> None:
    service = start(config=RULES, environment={"HEADGATE_ADMIN_TOKEN": "secret", "HEADGATE_READ_TOKEN": "reader"})
    admin = {"Authorization": "Bearer secret"}
    for _ in range(5):
        service.check(HOSTILE, admin, rule="login")

    page = look(service, state="refused")
    assert page.value(shown("#notice"))
    for token, state in (("wrong", "refused"), ("reader", "live")):
        give(page, token)
        page.until(f"document.querySelector('#status').dataset.state === '{state}'")
    page.until("document.querySelector('#keys').dataset.state === 'locked'")
    assert "admin token" in page.text("#keys")

    give(page, "secret")
    page.until("document.querySelector('#keys li b')?.textContent === '2'")
    assert page.text("#keys li code") == HOSTILE, "a key is text, whatever is in it"
    assert not page.value(shown("#busiest")), "too few checks to tell a busiest key"
    for _ in range(17):
        service.check(HOSTILE, admin)
    page.until(f"document.querySelector('#busiest li code')?.textContent === {json.dumps(HOSTILE)}")
    assert page.text("title") == "headgate"

    page.click("#token-open")
    page.click("#token-forget")
    page.until("document.querySelector('#status').dataset.state === 'refused'")
    assert page.value("sessionStorage.length") == 0


def give(page: Page, token: str) -> None:
    page.value("document.querySelector('#status').dataset.state = 'asked'")
    page.click("#token-open")
    page.type("#token", token)
    page.key("Enter", 13, "\r")


def test_reconnect(start: Start, look: Open, tmp_path: Path) -> None:
    """The page says that the connection is lost, and connects again."""
    service = start()
    page = look(service)
    service.stop()
    page.until("document.querySelector('#status').dataset.state === 'lost'")
    again = [sys.executable, "-m", "headgate", "serve", "--port", str(service.port)]
    with running(again, f"http://127.0.0.1:{service.port}/actuator/health/liveness", tmp_path):
        page.until("document.querySelector('#status').dataset.state === 'live'")


def test_a_store_that_is_down_is_said(start: Start, look: Open, mortal_server: Server) -> None:
    service = start("--store", mortal_server.patient_url)
    page = look(service)
    page.until("document.querySelector('#store').dataset.state === 'good'")
    assert page.text("#store-note").startswith("redis")
    mortal_server.kill()
    page.until("document.querySelector('#store').dataset.state === 'bad'")
    assert page.text("#store-state") == "Down" and page.value(shown("#notice"))
    mortal_server.restart()
    page.until("document.querySelector('#store').dataset.state === 'good'")
    page.until("document.querySelector('#notice').hidden")


def test_screens(service: Service, look: Open) -> None:
    """The page fits narrow and wide screens."""
    page = look(service)
    for width, phone in ((320, True), (390, True), (768, False), (1200, False), (2560, False)):
        page.screen(width=width, height=800, phone=phone)
        assert page.value("document.documentElement.scrollWidth") == width


def test_light_and_dark(service: Service, look: Open) -> None:
    page = look(service)
    for dark, ground in ((True, "rgb(14, 19, 26)"), (False, "rgb(246, 247, 249)")):
        page.screen(dark=dark)
        assert page.value("getComputedStyle(document.body).backgroundColor") == ground


def nameless(page: Page) -> list[str]:
    """The roles of elements that a screen reader would have no name for."""
    named = {
        "button",
        "link",
        "textbox",
        "spinbutton",
        "radio",
        "image",
        "dialog",
        "group",
        "region",
        "table",
        "searchbox",
    }
    return [
        node["role"]["value"]
        for node in page.ask("Accessibility.getFullAXTree")["nodes"]
        if not node["ignored"] and node["role"]["value"] in named and not node.get("name", {}).get("value")
    ]


def test_accessible_names(service: Service, look: Open) -> None:
    """Every control has a name for a screen reader."""
    page = look(service)
    assert nameless(page) == []
    ids = page.value("[...document.querySelectorAll('[id]')].map(found => found.id)")
    assert len(ids) == len(set(ids))
