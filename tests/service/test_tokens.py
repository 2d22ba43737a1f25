"""Tokens: which of them may check, read and reset."""

import hashlib

import pytest

from headgate.service.rsgi import HTTPError
from headgate.service.tokens import Tokens, digest
from tests.service.conftest import Start
from tests.support.service import API, Service


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


def test_no_tokens(service: Service, key: str) -> None:
    """Without tokens every client may do everything."""
    assert service.reset(key).status == 200
    assert service.check(key, bearer("whatever")).status == 200


def test_admin_token_alone(start: Start) -> None:
    """An admin token alone guards reset; checks stay open."""
    service = start(environment={"HEADGATE_ADMIN_TOKEN": "first,second"})
    assert service.check("a").status == 200
    assert service.remaining("a").status == 200
    assert service.get("/metrics").status == 200
    answer = service.reset("a")
    assert answer.status == 401 and answer.headers["www-authenticate"].startswith("Bearer")
    assert "Bearer TOKEN" in answer.problem
    assert service.reset("a", bearer("third")).status == 401
    assert service.reset("a", {"authorization": "Basic first"}).status == 401
    for token in ("first", "second"):
        assert service.reset("a", bearer(token)).status == 200


def test_scopes(start: Start) -> None:
    secret = hashlib.sha256(b"from-the-file").hexdigest()
    service = start(
        environment={"HEADGATE_CHECK_TOKEN": "c", "HEADGATE_READ_TOKEN": "r", "HEADGATE_ADMIN_TOKEN": "a"},
        config=f"[[tokens]]\nscope = 'check'\nsha256 = '{secret}'\n",
    )
    table = {  # the status of check, remaining, reset and metrics for each token
        "": (401, 401, 401, 401),
        "x": (401, 401, 401, 401),
        "r": (403, 200, 403, 200),
        "c": (200, 200, 403, 200),
        "from-the-file": (200, 200, 403, 200),
        "a": (200, 200, 200, 200),
    }
    for token, expected in table.items():
        headers = bearer(token) if token else {}
        found = (
            service.check("k", headers).status,
            service.remaining("k", headers).status,
            service.reset("k", headers).status,
            service.get("/metrics", headers=headers).status,
        )
        assert found == expected, token
    assert service.ask("POST", f"{API}/check/batch", body=[{}]).status == 401
    assert service.ask("HEAD", f"{API}/check").status == 401
    assert service.get("/live").status == 401
    assert service.get("/actuator/info").status == 401
    for open_to_all in ("/actuator/health", "/actuator/health/liveness", "/openapi.json", "/docs", "/"):
        assert service.get(open_to_all).status == 200


def test_a_token_in_a_file(start: Start, tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.mktemp("secrets") / "token"
    file.write_text("top secret\n")
    service = start(config=f"[[tokens]]\nscope = 'admin'\nfile = '{file}'\n")
    assert service.reset("k").status == 401
    assert service.reset("k", bearer("top secret")).status == 200


class Headers:
    def __init__(self, authorization: str) -> None:
        self.authorization = authorization

    def get(self, key: str, default: object = None) -> object:
        return self.authorization if key == "authorization" else default

    def get_all(self, key: str) -> list[str]:
        return []

    def __contains__(self, key: str) -> bool:
        return key == "authorization"


def test_odd_tokens() -> None:
    """A malformed Authorization header is refused and raises nothing else."""
    tokens = Tokens([(digest("é"), "admin")])
    tokens.demand("admin", Headers("bearer  é "))
    for odd in ("", "Bearer", "Bearer ", "Bearer \udcff", "Bearer é é", "é"):
        with pytest.raises(HTTPError):
            tokens.demand("admin", Headers(odd))
