"""Calls of Envoy's rate-limit service, made in this process."""

import tempfile
from pathlib import Path
from typing import Any

from headgate.service.envoy_rules import EnvoyRules
from headgate.service.envoy_settings import EnvoyDomain, EnvoySettings
from headgate.service.files import Sources
from headgate.service.rls_messages import OK, OVER_LIMIT, Descriptor, RateLimitRequest, RateLimitResponse
from headgate.stores.base import Store
from headgate.stores.memory import MemoryStore
from headgate.testing import ManualClock

CODES = {OK: "OK", OVER_LIMIT: "OVER"}
Entries = list[tuple[str, str]]


def read(*texts: str, settings: str = "") -> tuple[EnvoySettings, list[EnvoyDomain]]:
    """Settings and domains of files with these texts: a.yaml, b.yaml, ... beside headgate.toml."""
    with tempfile.TemporaryDirectory(prefix="headgate-test-") as name:
        folder = Path(name)
        for letter, text in zip("abcdef", texts, strict=False):
            (folder / f"{letter}.yaml").write_text(text)
        (folder / "headgate.toml").write_text(f'[envoy]\nfiles = ["*.yaml"]\n{settings}')
        sources = Sources(folder / "headgate.toml", {}, {})
        found = sources.read()
        return found.envoy, sources.envoy_domains(found)


class Calls:
    """The rules of a text, on a store in memory whose clock stands still unless another store is given."""

    def __init__(self, *texts: str, settings: str = "", store: Store | None = None) -> None:
        self.settings, self.domains = read(*texts, settings=settings)
        self.clock = ManualClock()
        self.store = MemoryStore(clock=self.clock) if store is None else store
        self.rules = EnvoyRules(self.domains, self.settings, self.store)

    def answer(self, *descriptors: Descriptor | Entries, hits: int = 0, domain: str = "") -> RateLimitResponse:
        made = [one if isinstance(one, Descriptor) else Descriptor(one) for one in descriptors]
        response = self.rules.decide_now(RateLimitRequest(domain or self.domains[0].domain, made, hits))
        assert response is not None
        return response

    def __call__(self, *descriptors: Descriptor | Entries, **options: Any) -> str:
        """The overall code, then code and remaining of each descriptor: `OVER: OVER 0, OK 5`; `-` has no limit."""
        return shown(self.answer(*descriptors, **options))


def shown(response: RateLimitResponse) -> str:
    parts = []
    for status in response.statuses:
        parts.append(f"{CODES[status.code]} {status.remaining if status.limit or status.remaining else '-'}")
    return f"{CODES[response.overall]}: {', '.join(parts)}"
