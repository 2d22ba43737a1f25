"""Read the YAML of envoyproxy/ratelimit; what it refuses is refused here with file, line and what would be right.

The nodes of the parser are read, and not the values that it makes of them: nodes know their lines, and a value such as
`value: 007` or `value: yes` counts as it is written.
"""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from headgate.rule import Rule
from headgate.service.envoy_settings import (
    UNITS,
    EnvoyDescriptor,
    EnvoyDomain,
    EnvoyLimit,
    EnvoySettings,
    domain_text,
    quotas_of,
    rule_names,
    side_settings,
)
from headgate.service.settings import BadFile, BadSetting

MAX_DESCRIPTORS = 20_000  # in all files; aliases of YAML could make any number
MAX_DEPTH = 32
MAX_REQUESTS = 0xFFFFFFFF
TAG = "tag:yaml.org,2002:"
TRUE, FALSE = ("true", "yes", "on", "y"), ("false", "no", "off", "n")

ROOT_FIELDS = ("domain", "descriptors")
FIELDS = (
    *("key", "value", "rate_limit", "descriptors", "shadow_mode", "quota_mode", "detailed_metric", "value_to_metric"),
    *("share_threshold", "metadata"),
)
LIMIT_FIELDS = ("unit", "requests_per_unit", "unlimited", "name", "replaces")
PLACES = {
    **dict.fromkeys(FIELDS, "to a descriptor, beside key"),
    **dict.fromkeys(LIMIT_FIELDS, "to rate_limit"),
    "domain": "to the top of the file",
}

Compose = Callable[[Path, str], Any]


def find_files(patterns: list[str], folder: Path) -> list[Path]:
    """The files that *patterns* name, in order, each once; relative ones are in *folder*."""
    found = [
        folder / name for pattern in patterns for name in sorted(glob.glob(pattern, root_dir=folder, recursive=True))
    ]
    return [path for path in dict.fromkeys(found) if path.is_file()]


def read_domains(envoy: EnvoySettings, folder: Path, compose: Compose) -> list[EnvoyDomain]:
    """The domains of all files. Raises `BadFile`, and `BadSetting` for a setting that fits none of them."""
    for i, pattern in enumerate(envoy.files):
        if not find_files([pattern], folder):
            raise BadSetting(("envoy", "files", i), f"there is no file {pattern!r:.80} in {folder}")
    domains: dict[str, EnvoyDomain] = {}
    reader = DomainReader(envoy.merge_domains, domains)
    for path in find_files(envoy.files, folder):
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise BadFile(f"{path}: cannot read it: {error}") from None
        reader.read(path, compose(path, text))
    _check_rules(envoy, list(domains.values()))
    return list(domains.values())


def _check_rules(envoy: EnvoySettings, domains: list[EnvoyDomain]) -> None:
    """Refuse a table that names no rule, and an algorithm that cannot apply a rule's limit."""
    known: dict[str, EnvoyLimit | None] = {domain_text(one.domain): None for one in domains}
    for one in domains:
        known |= {name: found.rate_limit for name, found in rule_names(one.domain, one.descriptors)}
    for name, table in envoy.rules.items():
        if name not in known:
            some = ", ".join(list(known)[:20]) or "none"
            raise BadSetting(("envoy", "rules", name), f"the files have no rule of this name; known are {some}")
        limit = known[name]
        if table.quotas is not None and limit is None:
            raise BadSetting(
                ("envoy", "rules", name, "quotas"), "quotas are for one rule; this is the name of a domain"
            )
        if table.quotas is not None and limit is not None and limit.unlimited:
            raise BadSetting(("envoy", "rules", name, "quotas"), "this rule is unlimited; give it a limit in its file")
    for name, limit in known.items():
        algorithm, quotas, _ = side_settings(envoy, name)
        if limit is not None and (found := quotas_of(limit, quotas)):
            try:
                Rule(found, algorithm)
            except ValueError as error:
                raise BadSetting(("envoy", "rules", name), f"{algorithm} cannot apply {found[0]}: {error}") from None


class DomainReader:
    """Reads one file after another into *domains*."""

    def __init__(self, merge: bool, domains: dict[str, EnvoyDomain]) -> None:
        self._merge = merge
        self._domains = domains
        self._path = Path()
        self._count = 0

    def read(self, path: Path, root: Any) -> None:
        """Add the domain of one file, whose parsed content is *root*."""
        self._path = path
        fields = self._fields(root, ROOT_FIELDS, "a file") if root is not None else {}
        name = self._text(fields.get("domain"), "domain")
        if not name:
            raise self._bad(fields.get("domain") or root, "the domain is missing or empty; write domain: my_domain")
        if name in self._domains and not self._merge:
            why = f"the domain {name!r:.80} is in another file, too; give each its own, or set merge_domains in [envoy]"
            raise self._bad(fields["domain"], why)
        known = self._domains.setdefault(name, EnvoyDomain(name, []))
        self._descriptors(fields.get("descriptors"), known.descriptors, 1)

    def _descriptors(self, node: Any, into: list[EnvoyDescriptor], depth: int) -> None:
        if depth > MAX_DEPTH:
            raise self._bad(node, f"descriptors are nested more than {MAX_DEPTH} deep")
        taken = {(one.key, one.value) for one in into}
        for item in self._items(node, "descriptors", "- key: name"):
            one = self._descriptor(item, depth)
            if (one.key, one.value) in taken:
                shown = f"key {one.key!r:.80}" + (
                    f" with the value {one.value!r:.80}" if one.value else " without a value"
                )
                raise self._bad(item, f"there is a second descriptor with the {shown} in this list; give it once")
            taken.add((one.key, one.value))
            into.append(one)

    def _descriptor(self, node: Any, depth: int) -> EnvoyDescriptor:
        self._count += 1
        if self._count > MAX_DESCRIPTORS:
            raise self._bad(node, f"more than {MAX_DESCRIPTORS:,} descriptors; that is the most of all files together")
        fields = self._fields(node, FIELDS, "a descriptor")
        key, value = self._text(fields.get("key"), "key"), self._text(fields.get("value"), "value")
        if not key:
            raise self._bad(fields.get("key") or node, "a descriptor needs a key; write key: name")
        if "*" in key:
            raise self._bad(fields["key"], f"the key {key!r:.80} has a *, which is for values; write value: prefix*")
        flags = {
            name: self._flag(fields.get(name), name)
            for name in FIELDS
            if name.endswith(("_mode", "_metric", "_threshold"))
        }
        if flags["share_threshold"] and "*" not in value:
            why = "share_threshold is for a value with a *, whose matches share one counter; remove it"
            raise self._bad(fields["share_threshold"], why)
        if not _is_null(fields.get("metadata")) and fields["metadata"].id != "mapping":
            raise self._bad(fields["metadata"], "metadata is a mapping; write metadata: {name: value}")
        one = EnvoyDescriptor(key, value, self._limit(fields.get("rate_limit")), descriptors=[], **flags)
        self._descriptors(fields.get("descriptors"), one.descriptors, depth + 1)
        return one

    def _limit(self, node: Any) -> EnvoyLimit | None:
        if _is_null(node):
            return None
        fields = self._fields(node, LIMIT_FIELDS, "rate_limit")
        unlimited = self._flag(fields.get("unlimited"), "unlimited")
        unit, count = self._text(fields.get("unit"), "unit").lower(), self._count_of(fields.get("requests_per_unit"))
        if unlimited and unit in UNITS:
            raise self._bad(fields["unit"], "an unlimited rate_limit has no unit; remove unit, or unlimited")
        if not unlimited and unit not in UNITS:
            what = f"unknown unit {unit!r:.40}" if unit else "the unit is missing"
            raise self._bad(fields.get("unit") or node, f"{what}; use one of {', '.join(UNITS)}")
        name = self._text(fields.get("name"), "name")
        replaces = list(self._replaces(fields.get("replaces"), name))
        return EnvoyLimit(count, UNITS.get(unit, 0), unlimited, name, replaces)

    def _replaces(self, node: Any, own: str) -> Iterator[str]:
        for item in self._items(node, "replaces", "- name: another"):
            found = self._fields(item, ("name",), "an item of replaces")
            name = self._text(found.get("name"), "name")
            if not name:
                raise self._bad(item, "an item of replaces needs the name of a rate_limit; write - name: another")
            if name == own:
                raise self._bad(item, f"{name!r:.80} would replace itself; name another rate_limit")
            yield name

    # ---------------------------------------------------------------------------------------------- single nodes

    def _fields(self, node: Any, known: tuple[str, ...], what: str) -> dict[str, Any]:
        """The values of a mapping by name."""
        if node.id != "mapping":
            raise self._bad(node, f"{what} is a mapping with {', '.join(known)}")
        fields: dict[str, Any] = {}
        for name, value in _merged(node):
            if name.id != "scalar" or name.tag != TAG + "str":
                raise self._bad(name, f"the name of a field is a text; known are {', '.join(known)}")
            if name.value not in known:
                place = PLACES.get(name.value)
                more = f"{name.value} belongs {place}" if place else f"known are {', '.join(known)}"
                raise self._bad(name, f"{what} has no field {name.value!r:.60}; {more}")
            fields[name.value] = value
        return fields

    def _items(self, node: Any, what: str, form: str) -> list[Any]:
        if _is_null(node):
            return []
        if node.id != "sequence":
            raise self._bad(node, f"{what} is a list; write {form}")
        for item in node.value:
            if item.id != "mapping":
                raise self._bad(item, f"{what} is a list of mappings; write {form}")
        items: list[Any] = node.value
        return items

    def _text(self, node: Any, what: str) -> str:
        if _is_null(node):
            return ""
        if node.id != "scalar":
            raise self._bad(node, f"{what} is a text, not a {node.id}")
        if node.tag == TAG + "float":  # envoyproxy/ratelimit refuses it, too: 1.10 could mean 1.1
            raise self._bad(node, f'{what} is a text; write {what}: "{node.value:.40}"')
        text: str = node.value
        return text

    def _flag(self, node: Any, what: str) -> bool:
        if _is_null(node):
            return False
        text = str(node.value).lower() if node.id == "scalar" and not node.style else ""
        if text not in TRUE + FALSE:
            raise self._bad(node, f"{what} is true or false")
        return text in TRUE

    def _count_of(self, node: Any) -> int:
        if _is_null(node):
            return 0
        form = f"requests_per_unit is a whole number from 0 to {MAX_REQUESTS}"
        if node.id != "scalar" or node.tag != TAG + "int" or ":" in node.value:
            raise self._bad(node, f"{form}, got {str(node.value)!r:.40}")
        text = node.value.replace("_", "").lower()
        octal = text.lstrip("+-").startswith("0") and text.lstrip("+-").isdecimal()
        try:
            count = int(text, 8) if octal else int(text, 0)
        except ValueError:  # !!int abc
            raise self._bad(node, f"{form}, got {node.value!r:.40}") from None
        if not 0 <= count <= MAX_REQUESTS:
            raise self._bad(node, f"{form}, got {node.value:.40}")
        return count

    def _bad(self, node: Any, why: str) -> BadFile:
        line = node.start_mark.line + 1 if node is not None else 1
        return BadFile(f"{self._path}:{line}: {why}")


def _is_null(node: Any) -> bool:
    """Whether a field is missing, empty or null."""
    return node is None or (node.id == "scalar" and node.tag == TAG + "null")


def _merged(node: Any, depth: int = 0) -> Iterator[tuple[Any, Any]]:
    """The pairs of a mapping; those of a merge (`<<: *other`) come first, so that its own replace them."""
    if depth > MAX_DEPTH:
        return
    for name, value in node.value:
        if name.tag == TAG + "merge":
            for other in reversed(value.value) if value.id == "sequence" else [value]:
                if other.id == "mapping":
                    yield from _merged(other, depth + 1)
    for name, value in node.value:
        if name.tag != TAG + "merge":
            yield name, value
