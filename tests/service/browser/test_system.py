"""The page's rules of the last hour and their settings, doors, leases and Redis servers, in a real browser."""

import json
import tomllib

import pytest

from headgate.service.busy_keys import HINT
from tests.service.browser.chromium import Page
from tests.service.browser.conftest import Open
from tests.service.browser.test_overview import give, nameless, shown
from tests.service.conftest import Start
from tests.support.resp import RespSocket, command
from tests.support.servers import Server
from tests.support.service import API, Service

pytestmark = pytest.mark.xdist_group("browser")  # one browser, whatever the number of workers

RULES = """
[rules.login]
quotas = "3/hour"
algorithm = "sliding_window"
exempt = ["vip@example.com"]
[rules.search]
quotas = ["9/minute", "90/hour"]
shadow = true
"""
LEASED = "[rules.tenant]\nquotas = '10000/second'\nhybrid = true\n"


def table(page: Page, body: str) -> list[list[str]]:
    """The text of the cells of a table, by row."""
    found: list[list[str]] = page.value(
        f"[...document.querySelectorAll('#{body} tr')].map(row => [...row.children].map(cell => cell.textContent))"
    )
    return found


def bars(page: Page, rule: str, outcome: str) -> str:
    row = (
        f"[...document.querySelectorAll('#hour-rules tr')].find(row => row.querySelector('b').textContent === '{rule}')"
    )
    return f"{row}?.querySelector('.bar.{outcome}').getAttribute('d')"


def settings_of(rule: str) -> str:
    return f"button[aria-label='Settings of {rule}']"


def test_last_hour(start: Start, look: Open) -> None:
    """Each rule has its counts of the last hour and a bar for each minute, also when the page was not open then."""
    service = start(config=RULES)
    for _ in range(7):
        service.check("somebody", rule="login")
    page = look(service)
    page.until("document.querySelectorAll('#hour-rules tr').length === 3")
    login, *others = table(page, "hour-rules")
    assert login == ["login3/hour, sliding window", "", "3", "4", "57.1 %", "Settings"]
    assert [row[0] for row in others] == [
        "default10/second burst 100, token bucket",
        "search9/minute and 90/hour, token bucket, shadow",
    ]
    assert page.value(bars(page, "login", "allowed")) and page.value(bars(page, "login", "denied"))
    assert not page.value(bars(page, "search", "allowed"))
    assert not page.value(shown("#find-rule")), "three rules need no search"
    service.check("somebody", rule="search")
    page.until(bars(page, "search", "allowed"))
    page.until("document.querySelector('#hour-rules tr:nth-child(2) b').textContent === 'search'")


def test_last_hour_of_slots(start: Start, look: Open) -> None:
    """A rule that limits concurrency has no quotas: its row has its number of slots and its lease."""
    service = start(config="[rules.uploads]\nconcurrency = 20\nlease = 60\nshadow = true\n")
    service.ask("POST", f"{API}/acquire", {"rule": "uploads", "key": "tenant:7"})
    page = look(service)
    page.until("document.querySelectorAll('#hour-rules tr').length === 2")
    assert table(page, "hour-rules")[0] == ["uploads20 at once, lease 60 s, shadow", "", "1", "0", "0 %", "Settings"]
    page.click(settings_of("uploads"))
    page.until("document.querySelector('#rule-toml').textContent.includes('concurrency = 20')")


def test_many_rules(start: Start, look: Open) -> None:
    """Of many rules the busiest are shown, and the others are found by their name."""
    service = start(config="".join(f"[rules.rule-{i}]\nquotas = '5/s'\n" for i in range(30)))
    page = look(service)
    page.until("document.querySelectorAll('#hour-rules tr').length === 12")
    assert page.text("#hour-more") == "and 19 more with less traffic"
    page.type("#find-rule", "RULE-29")
    page.until("document.querySelectorAll('#hour-rules tr').length === 1")
    assert table(page, "hour-rules")[0][0].startswith("rule-29")
    page.type("#find-rule", "nothing like this")
    page.until("document.querySelector('#hour-more').textContent === 'No rule has such a name.'")
    assert page.value(shown("#hour-more")) and nameless(page) == []


def test_settings_to_copy(start: Start, look: Open) -> None:
    """A rule is shown as TOML, by keyboard too, and copied; clients are named to an admin token only."""
    service = start(config=RULES, environment={"HEADGATE_ADMIN_TOKEN": "secret", "HEADGATE_READ_TOKEN": "reader"})
    page = look(service, state="refused")
    assert not page.value(shown("#hour")), "nothing is shown without the token"
    give(page, "reader")
    page.until(f"document.querySelector({json.dumps(settings_of('login'))}) !== null")
    page.value(f"document.querySelector({json.dumps(settings_of('login'))}).focus()")
    page.key("Enter", 13, "\r")
    page.until("document.querySelector('#rule-toml').textContent.includes('[rules.login]')")
    assert page.value("document.querySelector('#rule-dialog').open")
    text = page.text("#rule-toml")
    assert tomllib.loads(text) == {"rules": {"login": {"quotas": "3/hour", "algorithm": "sliding_window"}}}
    assert "vip" not in text and "left out without an admin token: 1 of exempt" in text
    assert nameless(page) == []
    page.value(
        "Object.defineProperty(navigator.clipboard, 'writeText', {value: async text => { window.copied = text }})"
    )
    page.click("#rule-copy")
    page.until("window.copied !== undefined")
    assert page.value("window.copied") == text
    assert page.text("#rule-copy") == "Copied"
    page.key("Escape", 27)
    page.until("!document.querySelector('#rule-dialog').open")
    assert page.value("document.activeElement.getAttribute('aria-label')") == "Settings of login"
    give(page, "secret")
    page.until("document.querySelector('#status').dataset.state === 'live'")
    page.click(settings_of("login"))
    page.until("document.querySelector('#rule-toml').textContent.includes('vip@example.com')")
    assert "secret" not in page.value("document.body.textContent")


def test_doors(start: Start, look: Open) -> None:
    """The open ports, how they are secured, and how many connections each has; a closed one tells how to open it."""
    service: Service = start("--resp-port", "0")
    page = look(service)
    with RespSocket(service) as client:
        client.send(command("PING"))
        assert client.reply() == "PONG"
        page.until("document.querySelector('#doors tr:nth-child(2) td:last-child')?.textContent === '1'")
        page.until("Number(document.querySelector('#doors td:last-child').textContent) > 0")
        http, resp, grpc = table(page, "doors")
        port = service.get("/actuator/info").json["listeners"][0]["port"]
        assert http[:3] == ["HTTP", str(service.port), "no TLS"]
        assert resp == ["Redis protocol", str(port), "no TLS", "1"]
        assert grpc == ["gRPC", "closed", "--grpc-port opens it", ""]
    page.until("document.querySelector('#doors tr:nth-child(2) td:last-child').textContent === '0'")
    assert not page.value(shown("#leases-card")) and not page.value(shown("#servers-card")), "on memory"


def test_leases(start: Start, look: Open, redis_server: Server) -> None:
    """Hybrid rules show what they hold and how much they decide without Redis."""
    service = start("--store", redis_server.patient_url, config=LEASED)
    page = look(service)
    batch = [{"key": "acme", "rule": "tenant"}] * 500
    assert service.ask("POST", f"{API}/check/batch", body=batch).status == 200
    page.until("document.querySelector('#leases td')?.textContent.endsWith('%')")
    page.until("document.querySelector('#leases td:nth-child(4)').textContent === '1'")
    [row] = table(page, "leases")
    assert row[0] == "tenant" and 0 < float(row[1].removesuffix(" %")) <= 100 and int(row[2].replace(",", "")) > 0
    assert page.text("#leases-trips").endswith("round trips a second") and page.value(shown("#leases-card"))
    for width in (320, 390, 768):
        page.screen(width=width, height=800)
        assert page.value("document.documentElement.scrollWidth") == width
    assert nameless(page) == []


def test_servers(start: Start, look: Open, mortal_server: Server) -> None:
    """The Redis server is shown with its figures, and as down when it is."""
    service = start("--store", mortal_server.patient_url, config="min_connections = 2\n")
    page = look(service)
    page.until("document.querySelector('#servers td:last-child')?.textContent === '2 idle'")
    [row] = table(page, "servers")
    assert row[:2] == [f"127.0.0.1:{mortal_server.port}", "up"] and row[2].endswith(("s", "µs", "ms"))
    assert row[3].endswith("iB") and int(row[5]) >= 2 and row[6] == "0"
    mortal_server.kill()
    page.until("document.querySelector('#servers .state.bad')?.textContent === 'down'")
    assert page.value("document.querySelector('#servers .state.bad').title"), "why it is down"
    mortal_server.restart()
    page.until("document.querySelector('#servers .state.good')?.textContent === 'up'")


def test_hot_rule(start: Start, look: Open, redis_server: Server) -> None:
    """A key that is asked hundreds of times a second under a rule that leases could serve has a hint."""
    service = start("--store", redis_server.patient_url, config=LEASED.replace("true", "false"))
    page = look(service)
    batch = [{"key": "acme", "rule": "tenant"}] * 1000
    for _ in range(10):
        assert service.ask("POST", f"{API}/check/batch", body=batch).status == 200
    page.until("document.querySelector('#busiest .hint') !== null")
    assert page.text("#busiest .hint") == HINT and page.text("#busiest li code") == "acme"
