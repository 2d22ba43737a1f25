"""Drive a real headless Chromium by its DevTools protocol, over a pair of pipes.

Pipes and not a web socket: nothing to install, no port to find, and the browser dies with the test process, because
Chromium ends when its pipe does.
"""

import base64
import itertools
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Self

from tests.service.deploy import tools

ANSWER = 30.0  # seconds for one command of the protocol; the machine may be busy
FLAGS = [
    "--headless=new",
    "--remote-debugging-pipe",  # reads commands from descriptor 3, writes answers to 4
    "--no-sandbox",  # it needs rights that containers and root lack; the only pages are our own
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-sync",
    "--no-first-run",
    "--no-default-browser-check",
    "--no-proxy-server",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--password-store=basic",
]

# In the child and not between fork and exec in ours, where a process with threads must not run Python.
PIPES_AT_3_AND_4 = """
import fcntl, os, sys
commands, answers = (fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3])
os.dup2(commands, 3)
os.dup2(answers, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Chromium:
    """One browser process of our own, with an empty profile that goes away with it."""

    def __init__(self, binary: Path) -> None:
        self._profile = tempfile.TemporaryDirectory(prefix="headgate-chromium-", ignore_cleanup_errors=True)
        commands_in, self._commands = os.pipe()
        self._answers, answers_out = os.pipe()
        chromium = [str(binary), *FLAGS, f"--user-data-dir={self._profile.name}", "about:blank"]
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", PIPES_AT_3_AND_4, str(commands_in), str(answers_out), *chromium],
            pass_fds=(commands_in, answers_out),
            env=_environment(Path(self._profile.name)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(commands_in)
        os.close(answers_out)
        self._numbers = itertools.count(1)
        self._unread = b""
        self.events: list[dict[str, Any]] = []

    def ask(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Send one command and give its result; events that arrive meanwhile are kept in `events`."""
        number = next(self._numbers)
        command = {"id": number, "method": method, "params": parameters} | ({"sessionId": session} if session else {})
        self._write(json.dumps(command).encode() + b"\0")
        deadline = time.monotonic() + ANSWER
        while True:
            message = self._read(deadline, method)
            if message.get("id") == number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']['message']}")
                result: dict[str, Any] = message["result"]
                return result
            if "method" in message:
                self.events.append(message)

    def _write(self, unsent: bytes) -> None:
        while unsent:
            unsent = unsent[os.write(self._commands, unsent) :]

    def _read(self, deadline: float, waiting_for: str) -> dict[str, Any]:
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"chromium did not answer {waiting_for} within {ANSWER:g} s")
            received = os.read(self._answers, 1 << 16)
            if not received:
                raise RuntimeError(f"chromium ended with {self.process.wait()} during {waiting_for}")
            self._unread += received
        message, _, self._unread = self._unread.partition(b"\0")
        parsed: dict[str, Any] = json.loads(message)
        return parsed

    def open(self, **screen: Any) -> "Page":
        """Open an empty page, with storage of its own; *screen* as in `Page.screen`."""
        context = self.ask("Target.createBrowserContext")["browserContextId"]
        target = self.ask("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session, context)
        for domain in ("Page", "Runtime", "Log"):
            page.ask(f"{domain}.enable")
        page.screen(**screen)
        return page

    def close(self) -> None:
        os.close(self._commands)  # asks it to end
        os.close(self._answers)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()  # by the process id that we started
            self.process.wait()
        self._profile.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Page:
    """One tab."""

    def __init__(self, browser: Chromium, session: str, context: str) -> None:
        self._browser, self._session, self._context = browser, session, context

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.ask(method, self._session, **parameters)

    def screen(self, *, width: int = 1200, height: int = 900, dark: bool = False, phone: bool = False) -> None:
        """Look at it on such a screen."""
        scale = 2 if phone else 1
        self.ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=phone
        )
        self.ask("Emulation.setTouchEmulationEnabled", enabled=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])

    def go(self, url: str) -> None:
        failed = self.ask("Page.navigate", url=url).get("errorText")
        if failed:
            raise RuntimeError(f"{url}: {failed}")
        self.until("document.readyState === 'complete'")

    def value(self, script: str) -> Any:
        """Give the value of an expression, awaited if it is a promise."""
        answer = self.ask("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise RuntimeError(details.get("exception", {}).get("description", details["text"]))
        return answer["result"].get("value")

    def until(self, script: str, within: float = 40.0) -> Any:
        """Wait until an expression is true; the value that it then has."""
        deadline = time.monotonic() + within
        while not (value := self.value(script)):
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {within:g} s: {script}")
            time.sleep(0.03)
        return value

    def text(self, selector: str) -> str:
        text: str = self.value(f"document.querySelector({json.dumps(selector)}).textContent")
        return text

    def _middle(self, selector: str) -> dict[str, float]:
        found = json.dumps(selector)
        box: dict[str, float] = self.value(
            f"(() => {{ const found = document.querySelector({found}); found.scrollIntoView({{block: 'center'}});"
            f" const box = found.getBoundingClientRect();"
            f" return {{x: box.x + box.width / 2, y: box.y + box.height / 2}} }})()"
        )
        return box

    def press(self, selector: str) -> None:
        """Put the mouse button down on something, and leave it down."""
        where = self._middle(selector)
        self.ask("Input.dispatchMouseEvent", type="mouseMoved", **where)
        self.ask("Input.dispatchMouseEvent", type="mousePressed", button="left", clickCount=1, **where)

    def release(self, selector: str) -> None:
        where = self._middle(selector)
        self.ask("Input.dispatchMouseEvent", type="mouseReleased", button="left", clickCount=1, **where)

    def click(self, selector: str) -> None:
        self.press(selector)
        self.release(selector)

    def key(self, name: str, code: int, text: str = "") -> None:
        """Press and release a key where the focus is."""
        common = {"key": name, "code": {" ": "Space"}.get(name, name), "windowsVirtualKeyCode": code}
        self.ask("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **common)
        self.ask("Input.dispatchKeyEvent", type="keyUp", **common)

    def type(self, selector: str, text: str) -> None:
        """Replace what a field holds."""
        found = json.dumps(selector)
        self.value(f"(() => {{ const field = document.querySelector({found}); field.focus(); field.select() }})()")
        self.ask("Input.insertText", text=text)

    def complaints(self) -> list[str]:
        """What the page or the browser complained about: exceptions, console errors, broken policies, failed loads."""
        self.value("1")  # whatever was said before this has then arrived
        found = []
        for event in self._browser.events:
            if event.get("sessionId") != self._session:
                continue
            about = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                details = about["exceptionDetails"]
                found.append(details.get("exception", {}).get("description", details["text"]))
            elif event["method"] == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
                entry = about["entry"]
                # an answer of 400 or a service that is down is what some tests are about; a missing file is not
                if entry["source"] != "network" or "/page/" in entry.get("url", ""):
                    found.append(f"{entry['text']} {entry.get('url', '')}")
            elif event["method"] == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning", "assert"):
                found.append(str([argument.get("value") for argument in about["args"]]))
        return found

    def picture(self, path: Path, *, whole: bool = True) -> None:
        """Save what the page looks like as the suffix says, PNG or WebP: all of it or what is in view."""
        kind: dict[str, Any] = {"format": "png"} if path.suffix == ".png" else {"format": "webp", "quality": 82}
        shot = self.ask("Page.captureScreenshot", captureBeyondViewport=whole, **kind)
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        self._browser.ask("Target.disposeBrowserContext", browserContextId=self._context)


def _environment(profile: Path) -> dict[str, str]:
    """The tools' environment, with fonts that were unpacked beside them and a home of its own."""
    variables = tools.environment() | {"HOME": str(profile), "XDG_CACHE_HOME": str(profile / "cache")}
    unpacked = tools.ROOT / "usr/share/fonts"
    if unpacked.is_dir():
        fonts = profile / "fonts.conf"
        machine = '<include ignore_missing="yes">/etc/fonts/fonts.conf</include>'
        fonts.write_text(f"<?xml version='1.0'?><fontconfig>{machine}<dir>{unpacked}</dir></fontconfig>")
        variables["FONTCONFIG_FILE"] = str(fonts)
    return variables
