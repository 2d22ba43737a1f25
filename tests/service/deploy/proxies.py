"""Real proxies before a real headgate and a real application, wired as the examples in deploy/ wire them."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.service.deploy import tools
from tests.service.deploy.processes import running
from tests.support.servers import quiet_port

NGINX = """
daemon off; worker_processes 1; pid {folder}/pid; error_log {folder}/error.log;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/a; proxy_temp_path {folder}/b;
    fastcgi_temp_path {folder}/c; uwsgi_temp_path {folder}/d; scgi_temp_path {folder}/e;
    include {folder}/headgate.conf;
}}
"""
CADDY = "{{\n\tadmin off\n\tpersist_config off\n\tstorage file_system {folder}\n}}\nimport {folder}/Caddyfile\n"


class Proxy(NamedTuple):
    """How to run a proxy with its example.

    *files* of deploy/ are copied; *main*, if there is one, is a file that includes them; *rule* is the text that names
    the rule; *patience* replaces its time-outs, as a machine that stands still for a moment is no service that is down.
    """

    program: str
    files: tuple[str, ...]
    command: tuple[str, ...]
    rule: str
    main: tuple[str, str] = ("", "")
    patience: Mapping[str, str] = {}


PROXIES = {
    "nginx": Proxy(
        "nginx",
        ("nginx/headgate.conf",),
        ("-p", "{folder}", "-c", "{folder}/nginx.conf"),
        "set $headgate_rule {};",
        ("nginx.conf", NGINX),
        {
            "proxy_connect_timeout 100ms": "proxy_connect_timeout 20s",
            "proxy_send_timeout 500ms": "proxy_send_timeout 20s",
            "proxy_read_timeout 500ms": "proxy_read_timeout 20s",
        },
    ),
    "traefik": Proxy(
        "traefik",
        ("traefik/traefik.yaml", "traefik/dynamic.yaml"),
        ("--configfile={folder}/traefik.yaml",),
        "forward/{}",
        patience={"providers:\n": "providers:\n  providersThrottleDuration: 50ms\n"},
    ),
    "caddy": Proxy(
        "caddy",
        ("caddy/Caddyfile",),
        ("run", "--adapter", "caddyfile", "--config", "{folder}/Main"),
        "forward/{}",
        ("Main", CADDY),
        {"dial_timeout 100ms": "dial_timeout 20s", "response_header_timeout 500ms": "response_header_timeout 20s"},
    ),
    "haproxy": Proxy(
        "haproxy",
        ("haproxy/haproxy.cfg", "haproxy/headgate.lua"),
        ("-db", "-f", "{folder}/haproxy.cfg"),
        "lua.headgate {}",
        patience={
            "timeout connect 100ms": "timeout connect 20s",
            "timeout server 500ms": "timeout server 20s",
            "check inter 1s fall 2": "check inter 60s fall 2",
        },
    ),
}
SHORT_NGINX = PROXIES["nginx"]._replace(files=("nginx/headgate-403.conf",), rule="forward/{}/403", patience={})


def program(name: str) -> Path:
    """The path of a proxy, or skip."""
    found = tools.PROGRAMS[name].find()
    if found is None:
        pytest.skip(tools.missing_reason(name))
    return found


@contextmanager
def in_front(
    proxy: Proxy,
    folder: Path,
    headgate: int,
    application: int,
    changes: Mapping[str, str] | None = None,
    ready: int = 200,
) -> Iterator[str]:
    """Run *proxy* with its example, its text changed by *changes*, until the block ends. Gives the URL for clients.

    The block is entered when a request through the proxy gets the status *ready*.
    """
    front = quiet_port()
    ports = {":8080": headgate, ":3000": application, ":8088": front}
    changes = {old: f":{port}" for old, port in ports.items()} | dict(proxy.patience) | dict(changes or {})
    files = {Path(name).name: (tools.HOUSE / "deploy" / name).read_text() for name in proxy.files}
    for old, new in changes.items():
        assert any(old in text for text in files.values()), f"the example of {proxy.program} has no {old!r}"
        files = {name: text.replace(old, new) for name, text in files.items()}
    files = {name: text.replace("abns@headgate", f"abns@headgate-{front}") for name, text in files.items()}
    for name, text in files.items():
        (folder / ("headgate.conf" if name.endswith(".conf") else name)).write_text(text)
    if proxy.main[0]:
        (folder / proxy.main[0]).write_text(proxy.main[1].format(folder=folder))
    command = [str(program(proxy.program)), *(word.format(folder=folder) for word in proxy.command)]
    url = f"http://127.0.0.1:{front}"
    with running(command, f"{url}/ready/{front}", folder, ready):
        yield url


class Application:
    """An application that says what it was sent, with the status that the path names. *seen* is what reached it."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Message]] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        seen = self.seen

        class Echo(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                seen.append((self.path, self.headers))
                body = b"app:" + self.rfile.read(int(self.headers.get("Content-Length") or 0))
                status = self.path.strip("/")
                self.send_response(int(status) if status.isdigit() else 200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            do_POST = do_HEAD = do_GET  # noqa: N815

            def log_message(self, *_: object) -> None:
                pass

        return Echo
