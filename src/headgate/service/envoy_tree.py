"""Which rule a descriptor of Envoy meets, as envoyproxy/ratelimit matches it, and the key of its counter.

Entry by entry, in order: the descriptor with the same key and value, else the first in the file whose value with a `*`
matches, else the one with the key alone. There is no way back: a descriptor that took the first way and finds no child
there has no rule. The rule must be as deep as the descriptor has entries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from headgate.service.envoy_settings import EnvoyDescriptor, bounded, entry_text
from headgate.service.rls_messages import Entry

RuleType = TypeVar("RuleType")


class DescriptorNode(Generic[RuleType]):
    """A descriptor of the YAML; the root stands for its domain."""

    __slots__ = ("any_value", "exact", "patterns", "rule", "shared")

    def __init__(self) -> None:
        self.exact: dict[Entry, DescriptorNode[RuleType]] = {}
        self.patterns: dict[str, list[tuple[list[str], DescriptorNode[RuleType]]]] = {}  # by key, in the file's order
        self.any_value: dict[str, DescriptorNode[RuleType]] = {}
        self.rule: RuleType | None = None
        self.shared = ""  # the value with a `*` whose matches share one counter

    def add(self, one: EnvoyDescriptor, way: str, make: Callable[[str, EnvoyDescriptor], RuleType]) -> None:
        """Add a descriptor and its children; *make* turns one that has a limit, and the way to it, into its rule."""
        node: DescriptorNode[RuleType] = DescriptorNode()
        here = way + entry_text(one.key, one.value or None)
        if one.rate_limit is not None:
            node.rule = make(here, one)
        if not one.value:
            self.any_value[one.key] = node
        else:
            self.exact[one.key, one.value] = node
        if "*" in one.value:
            self.patterns.setdefault(one.key, []).append((one.value.split("*"), node))
            node.shared = one.value if one.share_threshold else ""
        for child in one.descriptors:
            node.add(child, here + "|", make)

    def count(self) -> int:
        """How many rules there are here and below."""
        children = [*self.exact.values(), *self.any_value.values()]
        return (self.rule is not None) + sum(child.count() for child in children)

    def find(self, entries: Sequence[Entry]) -> tuple[RuleType, str] | None:
        """The rule that *entries* meet and the key of their counter, or None."""
        node = self
        shared: dict[int, str] = {}
        for i, entry in enumerate(entries):
            found = node.exact.get(entry)
            if found is None:
                found = node._find_value(entry)
                if found is None:
                    return None
            if found.shared:
                shared[i] = found.shared
            node = found
        if node.rule is None:
            return None
        return node.rule, counter_key(entries, shared)

    def _find_value(self, entry: Entry) -> DescriptorNode[RuleType] | None:
        key, value = entry
        for parts, node in self.patterns.get(key, ()):
            if matches(parts, value):
                return node
        return self.any_value.get(key)


def counter_key(entries: Sequence[Entry], shared: dict[int, str] | None = None) -> str:
    """The key of a descriptor's counter: `key=value|key=value`, or a digest of it if that is too long."""
    if not shared:
        return bounded("|".join([entry_text(key, value) for key, value in entries]))
    return bounded("|".join([entry_text(key, shared.get(i, value)) for i, (key, value) in enumerate(entries)]))


def matches(parts: list[str], value: str) -> bool:
    """Whether *value* matches a pattern, given as the parts between its `*`, which stand for any text or none."""
    at, end = len(parts[0]), len(value) - len(parts[-1])
    if at > end or not value.startswith(parts[0]) or not value.endswith(parts[-1]):
        return False
    for part in parts[1:-1]:
        at = value.find(part, at, end)
        if at < 0:
            return False
        at += len(part)
    return True
