"""The Huffman code of HTTP/2 headers (RFC 7541, appendix B), read four bits at a time.

The code is canonical: the lengths say it all. Symbols of one length have consecutive codes, in order, and a longer
code begins where the shorter ones end.
"""

from __future__ import annotations

from typing import Final

EOS: Final = 256  # the symbol that must not appear; its first bits, all ones, fill the last byte
_LONGEST: Final = 30

_SYMBOLS: Final[dict[int, bytes]] = {  # by the length of their codes in bits
    5: b"012aceiost",
    6: b" %-./3456789=A_bdfghlmnpru",
    7: b":BCDEFGHIJKLMNOPQRSTUVWYjkqvwxyz",
    8: b"&*,;XZ",
    10: b'!"()?',
    11: b"'+|",
    12: b"#>",
    13: b"\x00$@[]~",
    14: b"^}",
    15: b"<`{",
    19: bytes.fromhex("5cc3d0"),
    20: bytes.fromhex("808283a2b8c2e0e2"),
    21: bytes.fromhex("99a1a7acb0b1b3d1d8d9e3e5e6"),
    22: bytes.fromhex("8184858688929a9ca0a3a4a9aaadb2b5b9babbbdbec4c6e4e8e9"),
    23: bytes.fromhex("0187898a8b8c8d8f93959697989b9d9ea5a6a8aeafb4b6b7bcbfc5e7ef"),
    24: bytes.fromhex("098e9091949fabced7e1eced"),
    25: bytes.fromhex("c7cfeaeb"),
    26: bytes.fromhex("c0c1c8c9cacdd2d5dadbeef0f2f3ff"),
    27: bytes.fromhex("cbccd3d4d6dddedff1f4f5f6f7f8fafbfcfdfe"),
    _LONGEST - 2: bytes.fromhex("020304050607080b0c0e0f1011121314151718191a1b1c1d1e1f7fdcf9"),
    _LONGEST: bytes.fromhex("0a0d16"),  # and EOS
}

_EMITS: Final = 0x100  # in a transition: bits 0 to 7 are a symbol
_NEXT: Final = 9  # in a transition: where the number of the next state begins
_REFUSED: Final = -1


def codes() -> dict[int, tuple[int, int]]:
    """Code and length in bits of each symbol."""
    found: dict[int, tuple[int, int]] = {}
    code = length = 0
    for longer, symbols in _SYMBOLS.items():
        code <<= longer - length
        length = longer
        for symbol in [*symbols, EOS] if length == _LONGEST else [*symbols]:
            found[symbol] = code, length
            code += 1
    return found


def _tree() -> list[list[int]]:
    """Inner nodes with their two children: the number of an inner node, or a symbol as -1 - symbol."""
    nodes = [[0, 0]]
    for symbol, (code, length) in codes().items():
        at = 0
        for place in range(length - 1, 0, -1):
            bit = code >> place & 1
            if not nodes[at][bit]:
                nodes.append([0, 0])
                nodes[at][bit] = len(nodes) - 1
            at = nodes[at][bit]
        nodes[at][code & 1] = -1 - symbol
    return nodes


def _transition(nodes: list[list[int]], state: int, bits: int) -> int:
    """From *state* by four bits; no code is shorter than five, so they end at most one."""
    emitted = 0
    for place in (3, 2, 1, 0):
        state = nodes[state][bits >> place & 1]
        if state == -1 - EOS:
            return _REFUSED
        if state < 0:
            emitted = _EMITS | -1 - state
            state = 0
    return state << _NEXT | emitted


def _padding(nodes: list[list[int]]) -> list[bool]:
    """Whether a text may end in a state: after at most seven bits, all ones, of an unfinished code."""
    allowed = [False] * len(nodes)
    state = 0
    for _ in range(8):
        allowed[state] = True
        state = nodes[state][1]
    return allowed


_NODES: Final = _tree()
_TRANSITIONS: Final = [_transition(_NODES, state, bits) for state in range(len(_NODES)) for bits in range(16)]
_MAY_END: Final = _padding(_NODES)


def decode(data: bytes) -> bytes | None:
    """The text that *data* stands for; None if it has EOS or is not filled up with ones."""
    out = bytearray()
    state = 0
    for byte in data:
        step = _TRANSITIONS[state << 4 | byte >> 4]
        if step < 0:
            return None
        if step & _EMITS:
            out.append(step & 255)
        step = _TRANSITIONS[step >> _NEXT << 4 | byte & 15]
        if step < 0:
            return None
        if step & _EMITS:
            out.append(step & 255)
        state = step >> _NEXT
    return bytes(out) if _MAY_END[state] else None
