"""What every rule has, whatever it limits: the parts of its key, its exempt clients, its policy and its counters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headgate.service.settings import RuleSettings
from headgate.service.shared_counters import KINDS, SLOT_WORDS, TIMING_WORDS
from headgate.web.client_ip import IPAddress, IPNetwork, in_networks, parse_network


class KeyedRule:
    """A rule as a request meets it; *slot* is that of its counters, *kind* the algorithm, or `concurrency`."""

    __slots__ = (
        "exempt_keys",
        "exempt_networks",
        "json_end",
        "key_only",
        "key_parts",
        "label",
        "name",
        "on_store_error",
        "shadow",
        "slot",
        "timing",
    )

    def __init__(self, name: str, kind: str, settings: RuleSettings, slot: int) -> None:
        self.name = name
        self.label = kind.upper()
        self.on_store_error = settings.on_store_error
        self.shadow = settings.shadow
        self.json_end = "}" if name == "default" else f',"rule":"{name}"}}'
        self.key_parts = None if settings.key == ["key"] else [part.lower() for part in settings.key]
        networks = [found for text in settings.exempt if (found := _network(text))]
        self.exempt_networks: Sequence[IPNetwork] | None = networks or None
        self.exempt_keys = frozenset(settings.exempt) or None
        self.key_only = self.key_parts is None and self.exempt_keys is None  # the key alone decides
        self.slot = slot * SLOT_WORDS
        # where the times of denied checks begin; those of allowed checks follow
        self.timing = 2 * KINDS.index(kind) * TIMING_WORDS

    def is_exempt(self, key: str, address: Callable[[], IPAddress | None]) -> bool:
        """Whether *key*, or the client that sends it, is always allowed."""
        if self.exempt_keys is not None and key in self.exempt_keys:
            return True
        client = address() if self.exempt_networks is not None else None
        return client is not None and in_networks(client, self.exempt_networks or ())


def _network(text: str) -> IPNetwork | None:
    try:
        return parse_network(text)
    except ValueError:
        return None  # a key
