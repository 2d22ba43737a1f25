"""Settings from the command line, the environment and a file, in this order of precedence; errors name the line.

The last good configuration is kept beside the shared counters, for a worker that replaces another: the file may be
broken or half written by then, and the worker must not go back to the rules and tokens of the start.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from headgate.service.environment import PREFIX, checked, from_environment, unknown_variables
from headgate.service.envoy_files import find_files, read_domains
from headgate.service.envoy_settings import EnvoyDomain
from headgate.service.settings import BadFile, BadSetting, Settings, check, check_store_of_rules, convert
from headgate.service.tokens import read_tokens

DEFAULT_FILE = Path("headgate.toml")

SettingPath = tuple[str | int, ...]
Stamp = dict[str, tuple[int, int, int]]  # of each file that is there: time of the last change, size and inode


class Sources:
    """Where settings come from; they are read at the start and again after each change of a file."""

    def __init__(self, file: Path | None, given: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        self.file = file
        self.envoy_files: list[str] = []  # as the settings that were read last name them
        self._given = {name: value for name, value in given.items() if value is not None}
        self._environment = environment

    def read(self) -> Settings:
        """The merged and checked settings. Raises `BadFile`."""
        return self._merged(Settings() if self.file is None else read_file(self.file))

    def reread(self, before: Settings) -> Settings:
        """The same while *before* is in force. Also refuses a file that looks as if it were still being written."""
        in_file = Settings() if self.file is None else read_file(self.file)
        found = self._merged(in_file)
        if self.file is not None and in_file == Settings() and (before.rules or before.tokens):
            raise BadFile(f"{self.file}: it is empty; to drop every rule and token, restart")
        if before.tokens and not in_file.tokens:
            raise BadFile(f"{self.file}: its tokens are gone, which would open the API; to mean it, restart")
        return found

    def stamp(self, before: Stamp | None = None) -> Stamp:
        """A value that changes with the files; a file that *before* has keeps its value from there."""
        stamp: Stamp = {}
        for path in [*([self.file] if self.file else []), *find_files(self.envoy_files, self._folder)]:
            with suppress(OSError):  # it is missing, as when it is being replaced
                found = path.stat()
                stamp[str(path)] = found.st_mtime_ns, found.st_size, found.st_ino
        return stamp if before is None else {name: before.get(name, value) for name, value in stamp.items()}

    def envoy_domains(self, settings: Settings) -> list[EnvoyDomain]:
        """The rate limits of the files that *settings* name for Envoy. Raises `BadFile`."""
        try:
            return read_domains(settings.envoy, self._folder, compose_yaml)
        except BadSetting as error:
            raise BadFile(f"{self._place_of(error)}{error}") from None

    @property
    def _folder(self) -> Path:
        """Where relative names of files begin."""
        return Path() if self.file is None else self.file.parent

    def _place_of(self, error: BadSetting) -> str:
        """File and line of a setting that only the file can have, to begin an error with."""
        if self.file is None:
            return ""
        with suppress(OSError, ValueError):  # it has changed since it was read, and is no longer fine
            return f"{self.file}:{_line_in(self.file, error.path)}: "
        return f"{self.file}: "

    def _merged(self, settings: Settings) -> Settings:
        try:
            around = from_environment(self._environment, self._given) | checked("--", self._given)
            settings = msgspec.structs.replace(settings, **around)
            check(settings)
        except BadSetting as error:  # the file alone was fine
            raise BadFile(str(error)) from None
        try:
            check_store_of_rules(settings)
        except BadSetting as error:
            raise BadFile(f"{self._place_of(error)}{error}") from None
        self.envoy_files = settings.envoy.files
        return settings

    def warnings(self) -> list[str]:
        """A warning for each variable of the environment that looks like a setting and is not one."""
        return unknown_variables(self._environment)

    def tokens(self, settings: Settings) -> list[tuple[str, str]]:
        """Digest and scope of each token of the environment and of *settings*. Raises `BadFile`."""
        return read_tokens(settings, self._environment)


class LastGoodConfig(msgspec.Struct):
    """Settings, the digests and scopes of their tokens, rate limits for Envoy, and the stamp of their files."""

    settings: Settings
    tokens: list[tuple[str, str]]
    stamp: Stamp
    domains: list[EnvoyDomain] = []

    def save(self, folder: Path) -> None:
        """Write this to *folder*, which only the service can read; workers see the old file or the new one."""
        fresh = folder / f"settings.{os.getpid()}"
        fresh.write_bytes(msgspec.json.encode(self))
        fresh.replace(folder / "settings")

    @classmethod
    def load(cls, folder: Path) -> LastGoodConfig:
        return msgspec.json.decode((folder / "settings").read_bytes(), type=cls)


class FileWatch:
    """Decides from stamps taken once a second when the files have changed and are no longer being written."""

    def __init__(self, known: Stamp) -> None:
        self._known = self._last = known

    def is_new(self, stamp: Stamp) -> bool:
        """Whether *stamp* differs from the known one and is the same as the last; from then on it is known."""
        new = stamp != self._known and stamp == self._last
        self._last = stamp
        if new:
            self._known = stamp
        return new


def sources(config: str | None, given: Mapping[str, Any]) -> Sources:
    """The sources for a command line. The file is *config*, HEADGATE_CONFIG, or headgate.toml if there is one."""
    named = config or os.environ.get(PREFIX + "CONFIG")
    file = Path(named) if named else DEFAULT_FILE if DEFAULT_FILE.is_file() else None
    return Sources(file, given, dict(os.environ))


def read_file(path: Path) -> Settings:
    """The settings of a TOML or YAML file. Raises `BadFile` with the line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadFile(f"{path}: cannot read it: {error}") from None
    try:
        raw, line_of = _yaml(path, text) if path.suffix in (".yaml", ".yml") else _toml(path, text)
    except RecursionError:
        raise BadFile(f"{path}:1: lists or tables in it are nested too deeply") from None
    try:
        return convert(raw)
    except BadSetting as error:
        raise BadFile(f"{path}:{line_of(error.path)}: {error}") from None


def _line_in(path: Path, wanted: SettingPath) -> int:
    """The line of the file that sets *wanted*; the file was read before."""
    text = path.read_text(encoding="utf-8")
    parse = _yaml if path.suffix in (".yaml", ".yml") else _toml
    line: int = parse(path, text)[1](wanted)
    return line


def _toml(path: Path, text: str) -> tuple[Any, Any]:
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        at = re.search(r"line (\d+)", str(error))
        line = at[1] if at else str(text.count("\n") + 1)
        raise BadFile(f"{path}:{line}: this is no TOML: {error}") from None
    return raw, lambda wanted: _toml_line(text, wanted)


def _toml_line(text: str, wanted: SettingPath) -> int:
    """The line that sets *wanted*, or the longest part of it that is found."""
    best, line = 0, 1
    table: SettingPath = ()
    counts: dict[str, int] = {}
    for number, content in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*(\[\[?)\s*([^\]]+?)\s*\]\]?", content):
            table = _toml_path(header[2])
            if header[1] == "[[":
                counts[header[2]] = counts.get(header[2], -1) + 1
                table = (*table, counts[header[2]])
            here = table
        elif entry := re.match(r"\s*([^=#]+?)\s*=", content):
            here = (*table, *_toml_path(entry[1]))
        else:
            continue
        same = _common(here, wanted)
        if same > best and (same == len(here) or same == len(wanted)):
            best, line = same, number
    return line


def _common(one: SettingPath, other: SettingPath) -> int:
    """How many steps two paths share."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _toml_path(text: str) -> SettingPath:
    return tuple(part.strip().strip("\"'") for part in re.findall(r'"[^"]*"|\'[^\']*\'|[^.]+', text))


def _yaml(path: Path, text: str) -> tuple[Any, Any]:
    root, raw = parse_yaml(path, text, lambda yaml: yaml.safe_load(text))
    return raw or {}, lambda wanted: _yaml_line(root, wanted)


def compose_yaml(path: Path, text: str) -> Any:
    """The root of the nodes that the YAML parser makes of *text*; they know their lines. Raises `BadFile`."""
    try:
        return parse_yaml(path, text, lambda yaml: None)[0]
    except RecursionError:
        raise BadFile(f"{path}:1: lists or tables in it are nested too deeply") from None


def parse_yaml(path: Path, text: str, load: Callable[[Any], Any]) -> tuple[Any, Any]:
    """The root of the nodes, and what *load* makes of the module `yaml`; PyYAML is imported if there is a YAML file."""
    try:
        import yaml  # type: ignore[import-untyped]  # it ships no types
    except ImportError:
        raise BadFile(f"{path}: YAML needs PyYAML: pip install 'headgate[service]'") from None
    try:
        raw = load(yaml)
        root = yaml.compose(text, Loader=yaml.SafeLoader)  # the parser in C crashes on lists that are nested too deeply
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise BadFile(f"{path}:{mark.line + 1 if mark else 1}: this is no YAML: {error}") from None
    if twice := _duplicate_key(root):
        raise BadFile(f"{path}:{twice.start_mark.line + 1}: {twice.value!r:.60} is given twice; give it once")
    return root, raw


def _duplicate_key(root: Any) -> Any:
    """The node of a key that stands twice in its mapping; PyYAML would silently take the last."""
    waiting, seen = [root], set()
    while waiting:
        node = waiting.pop()
        if id(node) in seen or not isinstance(getattr(node, "value", None), list):
            continue
        seen.add(id(node))  # an alias refers to a node that was visited
        keys = set()
        for child in node.value:
            if not isinstance(child, tuple):
                waiting.append(child)
                continue
            name, value = child
            waiting.append(value)
            if isinstance(name.value, str) and name.value in keys:
                return name
            keys.add(name.value if isinstance(name.value, str) else id(name))
    return None


def _yaml_line(node: Any, wanted: SettingPath) -> int:
    """The line of *wanted*, from the line numbers that the parser stores in its nodes."""
    line = 1
    for step in wanted:
        children = node.value if node is not None and isinstance(node.value, list) else []
        if isinstance(step, int):
            node = children[step] if step < len(children) else None
            if node is None:
                break
            line = node.start_mark.line + 1
            continue
        for child in children:
            if isinstance(child, tuple) and child[0].value == step:
                line, node = child[0].start_mark.line + 1, child[1]
                break
        else:
            break
    return line
