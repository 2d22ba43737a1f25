"""URLs of PostgreSQL: what they may say, what is wrong with others, and that none shows its password."""

import pytest

from headgate import Limiter
from headgate.stores import PostgreSQLStore

SECRET = "geheim"


@pytest.mark.parametrize("scheme", ["postgresql", "postgres"])
def test_settings(scheme: str) -> None:
    """The URL says them, an argument overrides it, and what is libpq's goes to libpq."""
    url = f"{scheme}://app:{SECRET}@h1:5433/db?timeout=0.5&max_connections=3&prefix=mine&sslmode=require"
    store = PostgreSQLStore(url, max_connections=5)
    found = store.url
    assert (found.timeout, found.connect_timeout, found.max_connections, found.min_connections) == (0.5, 0.5, 5, 2)
    assert found.prefix == "mine"
    assert found.parameters["sslmode"] == "require" and found.parameters["port"] == "5433"
    assert store.display_name.startswith(f"{scheme}://***@h1:5433/db?")
    assert SECRET in found.conninfo().decode() and SECRET not in repr(store) + repr(found)


def test_several_hosts() -> None:
    url = f"postgresql://app:{SECRET}@h1,h2:5433/db?target_session_attrs=read-write"
    assert PostgreSQLStore(url).url.parameters["host"] == "h1,h2"


WRONG = {
    "postgresql://a:ge/heim@h/db": "port must be",
    "postgresql://a:geheim@h:many/db": "port must be",
    "postgresql://a:geheim@h:70000/db": "port must be",
    "postgresql://a:geheim@h/db?nonsense=1": "a parameter is unknown",
    "postgresql://a:geheim@[h/db": "cannot read",
    "postgresql://a:geheim@h/db?timeout=0": "timeout must be more than 0",
    "postgresql://a:geheim@h/db?timeout=soon": "timeout must be a number",
    "postgresql://a:geheim@h/db?max_connections=0": "max_connections must be a whole number",
    "postgresql://a:geheim@h/db?max_connections=1&min_connections=2": "at most max_connections",
    "postgresql://a:geheim@h/db?prefix=a-b": "prefix must be 1 to 40",
    "postgresql://h/db?password=geheim&timeout=-1": "timeout must be more than 0",
}


@pytest.mark.parametrize("url", WRONG)
def test_wrong_urls(url: str) -> None:
    with pytest.raises(ValueError, match=WRONG[url]) as caught:
        Limiter("5/second", store=url)
    assert "heim" not in str(caught.value) and "postgresql://user:password@host" in str(caught.value)
    assert caught.value.__cause__ is None and (caught.value.__context__ is None or caught.value.__suppress_context__)


def test_options_of_other_stores() -> None:
    """Those are dropped, so that the store can be a setting; unknown ones are an error."""
    Limiter("5/second", store="postgresql://h/db", max_keys=5, retries=3).close()
    with pytest.raises(TypeError, match="no option 'colour'"):
        PostgreSQLStore("postgresql://h/db", colour="red")  # type: ignore[call-arg]  # that is the point
    with pytest.raises(TypeError, match="takes a URL"):
        PostgreSQLStore(5)  # type: ignore[arg-type]  # that is the point
    with pytest.raises(ValueError, match="hash_keys must be"):
        PostgreSQLStore("postgresql://h/db", hash_keys="yes")  # type: ignore[arg-type]  # that is the point
