"""Keys: any text of 1 to 256 bytes without control characters is a key, and nothing else is."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate import Limiter
from headgate.errors import HeadgateError, InvalidKey
from headgate.testing import ManualClock

GOOD = [
    "a", "user:123", "a b", " ", "192.0.2.7", "2001:db8::1", "{", "}", "{}", "%", "%7B", "a/b?c=d&e#f",
    "é", "사용자", "\u202e", "a\u202eb", "\u200b", "x" * 256, "é" * 128, "😀" * 64, '"', "'", "\\", "*", "[a-z]",
]  # fmt: skip

BAD = [
    # key                   a word of the message that helps
    ("", "256"),
    ("x" * 257, "256"),
    ("x" * 300, "256"),
    ("é" * 129, "256"),
    ("😀" * 64 + "x", "256"),
    ("a\x00b", "control"),
    ("\n", "control"),
    ("a\tb", "control"),
    ("a\r\nb", "control"),
    ("\x1b[0m", "control"),
    ("\x7f", "control"),
    ("\x80", "control"),
    ("\x9f", "control"),
    ("\ud800", "surrogate"),
]

NOT_TEXT: list[object] = [None, 5, 1.5, True, b"user", ("a", "b"), ["a"]]


@pytest.mark.parametrize("key", GOOD, ids=ascii)
def test_good_keys(key: str) -> None:
    with Limiter("1/minute") as limiter:
        assert limiter.try_acquire(key)
        assert not limiter.try_acquire(key)


@pytest.mark.parametrize(("key", "word"), BAD, ids=[ascii(key)[:20] for key, _ in BAD])
def test_bad_keys(key: str, word: str) -> None:
    """The error says what would be right."""
    with Limiter("1/minute") as limiter, pytest.raises(InvalidKey, match=word) as caught:
        limiter.try_acquire(key)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, HeadgateError)


@pytest.mark.parametrize("key", NOT_TEXT, ids=repr)
def test_a_key_is_text(key: object) -> None:
    with Limiter("1/minute") as limiter, pytest.raises(InvalidKey, match="text"):
        limiter.try_acquire(key)  # type: ignore[arg-type]  # the point of the test


@given(st.text(max_size=300))
def test_exactly_these_are_keys(text: str) -> None:
    encoded = text.encode(errors="surrogatepass")
    right = 1 <= len(encoded) <= 256 and not any(unicodedata.category(char) in ("Cc", "Cs") for char in text)
    with Limiter("1/minute", clock=ManualClock()) as limiter:
        if right:
            assert limiter.try_acquire(text)
        else:
            with pytest.raises(InvalidKey):
                limiter.try_acquire(text)
