"""headgate token: a new token, and its digest for the file."""

from __future__ import annotations

import argparse
import hashlib
import secrets
from typing import Any


def add(commands: Any) -> None:
    text = "print a new random token, and the SHA-256 of it that goes into the file"
    commands.add_parser("token", help=text, description=text).set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    token = secrets.token_urlsafe(32)
    print(f"token   {token}\nsha256  {hashlib.sha256(token.encode()).hexdigest()}")
    return 0
