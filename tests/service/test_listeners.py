"""Ports beside HTTP: how they are opened, secured and closed, with the Redis protocol as the example."""

import os
import signal
import socket
import ssl
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest
import redis
import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from redis.backoff import NoBackoff
from redis.retry import Retry

from headgate.service.certificates import server_context
from headgate.service.files import Sources
from headgate.service.settings import BadFile, TLSSettings
from tests.service.conftest import Start
from tests.support.resp import RespSocket, command, port_of
from tests.support.servers import Server
from tests.support.service import Service, eventually, headgate


class Certificates:
    """Files of an authority, a server's certificate and a client's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = trustme.CA()
        self.authority.cert_pem.write_to_path(folder / "ca.pem")
        self.renew()
        client = self.authority.issue_cert("client")
        client.private_key_and_cert_chain_pem.write_to_path(folder / "client.pem")

    def renew(self) -> None:
        made = self.authority.issue_cert("127.0.0.1", "localhost")
        made.private_key_pem.write_to_path(self.folder / "key.pem")
        made.cert_chain_pems[0].write_to_path(self.folder / "cert.pem")

    def settings(self, client_ca: bool = False) -> str:
        more = f"client_ca = '{self.folder / 'ca.pem'}'\n" if client_ca else ""
        return f"[tls]\ncert = '{self.folder / 'cert.pem'}'\nkey = '{self.folder / 'key.pem'}'\n{more}"

    def client(self, service: Service, certificate: bool = False) -> redis.Redis:
        own = str(self.folder / "client.pem") if certificate else None
        return redis.Redis(
            port=port_of(service),
            ssl=True,
            ssl_ca_certs=str(self.folder / "ca.pem"),
            ssl_certfile=own,
            ssl_keyfile=own,
            retry=Retry(NoBackoff(), 0),
        )


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path)


def serial(service: Service) -> int:
    """The number of the certificate that the listener shows."""
    with socket.create_connection(("127.0.0.1", port_of(service)), timeout=30) as plain:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with context.wrap_socket(plain) as secure:
            found = secure.getpeercert(binary_form=True)
    assert found is not None
    return hash(found)


def test_tls(start: Start, certificates: Certificates) -> None:
    """With [tls] the port speaks TLS only; a SIGHUP reads a renewed certificate, and a bad one changes nothing."""
    service = start("--resp-port", "0", config=certificates.settings())
    assert "rediss://" in service.log()
    with certificates.client(service) as client:
        assert client.execute_command("CL.THROTTLE", "k", 4, 1, 3600) == [0, 5, 4, -1, 3600]
        pipeline = client.pipeline(transaction=False)
        for _ in range(300):
            pipeline.execute_command("CL.THROTTLE", "k" * 200, 4, 1, 3600)
        assert sum(row[0] == 0 for row in pipeline.execute()) == 5
    with RespSocket(service) as plain, suppress(ConnectionError):
        plain.send(command("PING"))
        assert b"PONG" not in plain.socket.recv(100)
    before = serial(service)
    certificates.renew()
    service.config.write_text(service.config.read_text() + "\n# changed\n")
    eventually(lambda: serial(service) != before, "the new certificate is shown")
    with certificates.client(service) as client:
        assert client.ping()
    now = serial(service)
    (certificates.folder / "key.pem").write_text("no key")
    service.config.write_text(service.config.read_text() + "\n# changed again\n")
    eventually(lambda: "new certificates are not used" in service.log(), "the error is logged")
    assert serial(service) == now
    assert service.get("/actuator/info").json["listeners"] == [{"name": "resp", "port": port_of(service), "tls": True}]


def test_mutual_tls(start: Start, certificates: Certificates) -> None:
    """With client_ca, a client without a certificate of that authority is refused."""
    service = start("--resp-port", "0", config=certificates.settings(client_ca=True))
    with certificates.client(service, certificate=True) as client:
        assert client.ping()
    with pytest.raises(redis.ConnectionError), certificates.client(service) as client:
        client.ping()


def test_new_authority(start: Start, certificates: Certificates) -> None:
    """A reload reads client_ca again: clients of the new authority get in, those of the old one do not."""
    clients = certificates.folder / "clients.pem"
    certificates.authority.cert_pem.write_to_path(clients)
    settings = certificates.settings() + f"client_ca = '{clients}'\n"
    service = start("--resp-port", "0", config=settings)
    port = port_of(service)

    def context(name: str) -> ssl.SSLContext:
        made = ssl.create_default_context(cafile=str(certificates.folder / "ca.pem"))
        made.maximum_version = ssl.TLSVersion.TLSv1_2  # its handshake ends with the verdict, and makes a session
        made.load_cert_chain(certificates.folder / name)
        return made

    def connect(context: ssl.SSLContext, session: ssl.SSLSession | None = None) -> ssl.SSLSocket:
        plain = socket.create_connection(("127.0.0.1", port), timeout=30)
        try:
            return context.wrap_socket(plain, server_hostname="127.0.0.1", session=session)
        except BaseException:
            plain.close()
            raise

    def ping(secure: ssl.SSLSocket) -> None:
        secure.sendall(command("PING"))
        assert secure.recv(100) == b"+PONG\r\n"

    def is_let_in(context: ssl.SSLContext, session: ssl.SSLSession | None = None) -> bool:
        try:
            connect(context, session).close()
        except (ssl.SSLError, ConnectionError):
            return False
        return True

    other = trustme.CA()
    other.issue_cert("other").private_key_and_cert_chain_pem.write_to_path(certificates.folder / "other.pem")
    before, after = context("client.pem"), context("other.pem")
    with connect(before) as kept:
        ping(kept)
        session = kept.session
        with connect(before, session) as resumed:
            assert resumed.session_reused, "else the test below would say nothing"
        assert not is_let_in(after)
        other.cert_pem.write_to_path(clients)
        service.signal(signal.SIGHUP)
        eventually(lambda: is_let_in(after), "the new authority counts")
        assert not is_let_in(before) and not is_let_in(before, session)
        ping(kept)  # a connection stays as it was made
    clients.write_text("no certificate")
    service.signal(signal.SIGHUP)
    eventually(lambda: "new certificates are not used" in service.log(), "the error is logged")
    assert is_let_in(after)


def test_bad_certificates(certificates: Certificates) -> None:
    """The error names the file, and what is wrong with it."""
    cert, key, other = (str(certificates.folder / name) for name in ("cert.pem", "key.pem", "other.pem"))
    encrypted = str(certificates.folder / "encrypted.pem")
    certificates.authority.issue_cert("x").private_key_pem.write_to_path(other)
    secret = load_pem_private_key(Path(other).read_bytes(), None).private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"a passphrase")
    )
    Path(encrypted).write_bytes(secret)
    server_context(TLSSettings(cert, key))
    for settings, why in (
        (TLSSettings("nope.pem", key), "tls.cert: cannot read 'nope.pem': No such file"),
        (TLSSettings(cert, "nope.pem"), "tls.key: cannot read 'nope.pem': No such file"),
        (TLSSettings(cert, other), f"the key '{other}' does not belong to the certificate '{cert}'"),
        (TLSSettings(key, key), "must hold a certificate and its key as PEM"),
        (TLSSettings(cert, encrypted), f"'{encrypted}' is encrypted; give the key without a passphrase"),
        (TLSSettings(cert, key, "nope.pem"), "tls.client_ca: cannot read 'nope.pem'"),
        (TLSSettings(cert, key, key), f"tls.client_ca: '{key}' has no certificate"),
    ):
        with pytest.raises(BadFile) as raised:
            server_context(settings)
        assert why in str(raised.value)


@pytest.mark.server
def test_port_in_use(tmp_path: Path) -> None:
    """A port in use stops the start, and the error names the option."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        found = headgate("serve", "--port", "0", "--resp-port", port, folder=tmp_path)
    assert found.returncode == 1
    why = "Address already in use; choose others with --host and --resp-port"
    assert f"cannot listen on 127.0.0.1:{port}: {why}" in found.stderr


@pytest.mark.parametrize("command_line", [["serve", "--port", "0"], ["config", "validate"]])
@pytest.mark.server
def test_missing_certificates(tmp_path: Path, command_line: list[str]) -> None:
    """Certificates that are not there stop the start."""
    (tmp_path / "headgate.toml").write_text("[tls]\ncert = 'a'\nkey = 'b'\n")
    found = headgate(*command_line, folder=tmp_path)
    assert found.returncode == 5 and "tls.cert: cannot read 'a': No such file" in found.stderr


@pytest.mark.parametrize(
    "text, why",
    [
        ("port = 7000\nresp_port = 7000", ":2: resp_port: 7000 is also port; give each a port of its own"),
        ("resp_port = 70000", ":1: resp_port: expected `int` <= 65535"),
        ("[tls]\ncert = 'a'", ":1: tls: object missing required field `key`"),
        ("[tls]\ncertificate = 'a'", ":2: tls.certificate: there is no such setting; known are cert, key, client_ca"),
        ("[rules.'cl.throttle']\nquotas = '1/s'", ":1: rules.cl.throttle: the limits of the command CL.THROTTLE have"),
    ],
)
def test_bad_settings(tmp_path: Path, text: str, why: str) -> None:
    """The file is refused with the line and what would be right."""
    file = tmp_path / "headgate.toml"
    file.write_text(text)
    with pytest.raises(BadFile) as raised:
        Sources(file, {}, {}).read()
    assert str(raised.value).startswith(f"{file}{why}")


def test_ports_from_the_environment() -> None:
    """A port may come from the environment or the command line; what Kubernetes puts there for a Service is none."""
    assert Sources(None, {}, {}).read().resp_port is None
    assert Sources(None, {}, {"HEADGATE_RESP_PORT": "6380"}).read().resp_port == 6380
    assert Sources(None, {"resp_port": 0}, {"HEADGATE_RESP_PORT": "6380"}).read().resp_port == 0
    assert Sources(None, {}, {"HEADGATE_GRPC_PORT": "tcp://10.0.0.1:81"}).read().grpc_port is None
    with pytest.raises(BadFile, match="HEADGATE_RESP_PORT='many'"):
        Sources(None, {}, {"HEADGATE_RESP_PORT": "many"}).read()


def test_two_workers(start: Start) -> None:
    """Connections are spread over the workers, and their limits are shared."""
    service = start("--resp-port", "0", "--workers", "2")
    eventually(lambda: service.metrics()["rate_limiter_workers"] == 2, "both at work")
    found: list[int] = []
    for _ in range(40):
        with RespSocket(service) as client:
            found += [client.ask("CL.THROTTLE", "k", 29, 1, 100_000)[0] for _ in range(2)]
    assert found.count(0) == 30 and found[-50:] == [1] * 50


@pytest.mark.skipif(sys.platform != "linux", reason="looks for workers in /proc")
def test_worker_replaced(start: Start) -> None:
    """The worker that replaces a dead one opens the port again."""
    service = start("--resp-port", "0")
    [victim] = service.workers()
    with RespSocket(service) as client:
        assert client.ask("PING") == "PONG"
        os.kill(victim, signal.SIGKILL)
        assert client.replies() == []

    def answers() -> bool:
        try:
            with RespSocket(service) as again:
                return bool(again.ask("PING") == "PONG")
        except (OSError, EOFError):
            return False

    eventually(answers, "another worker listens")


class Spender:
    """Connections that send pipelines until the service ends, and count what they were granted."""

    def __init__(self, port: int, connections: int, words: tuple[object, ...]) -> None:
        self.granted = [0] * connections
        self.errors: list[BaseException] = []
        self._port = port
        self._words = words
        self._threads = [threading.Thread(target=self._spend, args=(i,)) for i in range(connections)]
        for thread in self._threads:
            thread.start()

    def _spend(self, number: int) -> None:
        try:
            with RespSocket(self._port) as client:
                while True:
                    client.send(command(*self._words) * 7)
                    for _ in range(7):
                        self.granted[number] += client.reply()[0] == 0
        except (EOFError, ConnectionError):
            pass  # the service has ended
        except BaseException as error:
            self.errors.append(error)

    def join(self) -> int:
        for thread in self._threads:
            thread.join()
        assert not self.errors
        return sum(self.granted)


@pytest.mark.parametrize("kind", ["shared", "redis"])
def test_stop_under_load(start: Start, tmp_path: Path, redis_server: Server, kind: str) -> None:
    """A service that stops has delivered every reply whose permits it took: nothing is spent that no client saw."""
    (tmp_path / "store").mkdir(mode=0o700)
    store = redis_server.patient_url if kind == "redis" else f"shared://{tmp_path / 'store'}"
    limit = 10_000_000
    words = ("CL.THROTTLE", "k", limit - 1, 1, 300)  # none comes back while the test runs
    service = start("--resp-port", "0", "--store", store)
    spender = Spender(port_of(service), 6, words)
    eventually(lambda: min(spender.granted) > 50, "all are being served")
    assert service.stop() == 0
    granted = spender.join()
    after = start("--resp-port", "0", "--store", store)
    with RespSocket(after) as client:
        left = client.ask(*words, 0)[2]
    assert limit - left == granted
    assert "Traceback" not in service.log()
