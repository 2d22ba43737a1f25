"""Settings from the environment and the command line, and what else begins with HEADGATE_ there."""

from pathlib import Path
from typing import Any

import pytest

from headgate.service.files import Sources
from headgate.service.settings import BadFile
from tests.service.conftest import Start
from tests.support.service import headgate

# what a pod finds in a namespace with Services called headgate and headgate-redis
KUBERNETES = {
    "HEADGATE_SERVICE_HOST": "10.0.0.1",
    "HEADGATE_SERVICE_PORT": "80",
    "HEADGATE_SERVICE_PORT_HTTP": "80",
    "HEADGATE_PORT": "tcp://10.0.0.1:80",
    "HEADGATE_PORT_80_TCP": "tcp://10.0.0.1:80",
    "HEADGATE_PORT_80_TCP_PROTO": "tcp",
    "HEADGATE_PORT_80_TCP_PORT": "80",
    "HEADGATE_PORT_80_TCP_ADDR": "10.0.0.1",
    "HEADGATE_REDIS_SERVICE_HOST": "10.0.0.2",
    "HEADGATE_REDIS_PORT": "tcp://10.0.0.2:6379",
    "HEADGATE_REDIS_PORT_6379_TCP_ADDR": "10.0.0.2",
}


def test_precedence(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text("port = 1001\nworkers = 2\nmax_wait = 5\n")
    environment = {"HEADGATE_PORT": "1002", "HEADGATE_WORKERS": "3", "HEADGATE_LOG_KEYS": "true"}
    settings = Sources(file, {"port": 1003, "store": None}, environment).read()
    assert (settings.port, settings.workers, settings.max_wait, settings.store) == (1003, 3, 5.0, "memory://")
    assert settings.log_keys is True
    with pytest.raises(BadFile, match="HEADGATE_PORT='many'"):
        Sources(None, {}, {"HEADGATE_PORT": "many"}).read()
    with pytest.raises(BadFile, match="--port=70000"):
        Sources(None, {"port": 70000}, {}).read()
    with pytest.raises(BadFile, match="trusted_proxies"):
        Sources(None, {}, {"HEADGATE_TRUSTED_PROXIES": "nope"}).read()


def test_command_line_first() -> None:
    """A variable is not even read if the command line sets the same."""
    assert Sources(None, {"port": 1003}, {"HEADGATE_PORT": "many"}).read().port == 1003
    with pytest.raises(BadFile, match="HEADGATE_PORT='many'"):
        Sources(None, {"port": None}, {"HEADGATE_PORT": "many"}).read()


def test_kubernetes_port(tmp_path: Path) -> None:
    """`HEADGATE_PORT=tcp://...` of Kubernetes is not a port setting."""
    file = tmp_path / "a.toml"
    file.write_text("port = 1001\n")
    assert Sources(file, {}, KUBERNETES).read().port == 1001
    assert Sources(None, {}, {"HEADGATE_PORT": "udp://10.0.0.1:80"}).read().port == 8080
    with pytest.raises(BadFile, match="HEADGATE_PORT='http://x'"):
        Sources(None, {}, {"HEADGATE_PORT": "http://x"}).read()


def test_pod(start: Start) -> None:
    """In a pod the service starts without warnings about Kubernetes' variables."""
    service = start(environment=KUBERNETES)
    assert service.check("k").status == 200
    assert "warning" not in service.log() and "HEADGATE_" not in service.log()


@pytest.mark.parametrize(
    "text, found",
    [(word, True) for word in ("true", "True", "yes", "on", "1")]
    + [(word, False) for word in ("false", "FALSE", "no", "Off", "0", "")],
)
def test_switches(text: str, found: bool) -> None:
    """A switch may be written as yes, on, true or 1."""
    assert Sources(None, {}, {"HEADGATE_LOG_KEYS": text}).read().log_keys is found


@pytest.mark.parametrize(
    "name, text, says",
    [
        ("LOG_KEYS", "maybe", "HEADGATE_LOG_KEYS='maybe': expected `bool`, got `str`; write true or false"),
        ("LOG_LEVEL", "loud", "use one of debug, info"),
        ("WORKERS", "yes", "expected `int`"),
        ("HOST", "", None),
    ],
)
def test_wrong_value(name: str, text: str, says: Any) -> None:
    """A wrong value is named together with what would be right."""
    sources = Sources(None, {}, {f"HEADGATE_{name}": text})
    if says is None:
        assert sources.read().host == "127.0.0.1"  # empty is as good as not set
        return
    with pytest.raises(BadFile) as caught:
        sources.read()
    assert says in str(caught.value)


def test_unknown_variable(start: Start, tmp_path: Path) -> None:
    """A variable that looks like a setting and is not one is warned of."""
    names = {"HEADGATE_PROT": "9", "HEADGATE_LOGKEYS": "1", "HEADGATE_QUITE_ANOTHER": "x", "HEADGATE_ADMIN_TOKEN": "t"}
    said = [
        "HEADGATE_LOGKEYS is not a setting and has no effect; did you mean HEADGATE_LOG_KEYS?",
        "HEADGATE_PROT is not a setting and has no effect; did you mean HEADGATE_PORT?",
        "HEADGATE_QUITE_ANOTHER is not a setting and has no effect",
    ]
    log = start(environment=names).log()
    assert [line.strip() for line in log.splitlines() if " warning " in line] == [f"warning  {text}" for text in said]
    for action in ("validate", "show"):
        done = headgate("config", action, folder=tmp_path, environment=names | KUBERNETES)
        assert done.returncode == 0 and done.stderr.splitlines() == [f"headgate: {text}" for text in said]
