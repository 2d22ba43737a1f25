"""The newest settings that were good, where a worker that takes another's place finds them.

The file may be a bad one by then, or half written: neither is a reason to go back to the rules and tokens of the start.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from headgate.service.files import Stamp
from headgate.service.settings import Settings


class Kept(msgspec.Struct):
    """Settings, the tokens that they name as digests with scopes, and the stamp of the file that they came from."""

    settings: Settings
    tokens: list[tuple[str, str]]
    stamp: Stamp


def keep(board: Path, kept: Kept) -> None:
    """Write *kept* beside the board, in a folder that is ours alone."""
    fresh = board.with_name(f"settings.{os.getpid()}")
    fresh.write_bytes(msgspec.json.encode(kept))
    fresh.replace(board.with_name("settings"))


def newest(board: Path) -> Kept:
    return msgspec.json.decode(board.with_name("settings").read_bytes(), type=Kept)
