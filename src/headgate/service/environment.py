"""Settings from the environment and from the command line, one variable or option each."""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

import msgspec

from headgate.service.settings import PORTS, SCOPES, BadSetting, Settings, explain, lowered

PREFIX = "HEADGATE_"
# The settings that the environment may set; a list is written with commas.
DEFAULTS = {
    name: value
    for name, value in msgspec.structs.asdict(Settings()).items()
    if name not in ("rules", "plans", "tokens", "tls", "envoy", "grpc")
}
NAMES = [*(name.upper() for name in DEFAULTS), "CONFIG", *(f"{scope.upper()}_TOKEN" for scope in SCOPES)]
SWITCHES = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}

# Kubernetes sets such variables for every Service of a namespace; a Service called headgate makes them look like ours.
_KUBERNETES = re.compile(r"(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)")
_LINK = re.compile("(tcp|udp|sctp)://")


def from_environment(environment: Mapping[str, str], given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the environment, without those *given* on the command line, which take precedence."""
    found: dict[str, Any] = {}
    for field, default in DEFAULTS.items():
        text = environment.get(PREFIX + field.upper(), "")
        if not text or field in given or (field in PORTS and _LINK.match(text)):
            continue
        found[field] = text
        if isinstance(default, list):
            found[field] = [part.strip() for part in text.split(",") if part.strip()]
        elif isinstance(default, bool):
            found[field] = SWITCHES.get(text.lower(), text)
    return checked(PREFIX, found)


def checked(prefix: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The values of *given*, each converted to the type of its setting. Raises `BadSetting`."""
    found = {}
    for field, value in given.items():
        try:
            found[field] = getattr(msgspec.convert({field: lowered(field, value)}, Settings, strict=False), field)
        except msgspec.ValidationError as error:
            name = field.upper() if prefix == PREFIX else field.replace("_", "-")
            why = explain((field,), str(error).partition(" - at")[0])
            raise BadSetting((), f"{prefix}{name}={value!r:.60}: {why}") from None
    return found


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """A warning for each variable that looks like a setting and is not one."""
    found = []
    for variable in sorted(environment):
        name = variable.removeprefix(PREFIX)
        if name == variable or name in NAMES or _KUBERNETES.fullmatch(name):
            continue
        if name.endswith("_PORT") and _LINK.match(environment[variable]):
            continue
        near = get_close_matches(name, NAMES, 1, 0.7)
        found.append(
            f"{variable} is not a setting and has no effect" + (f"; did you mean {PREFIX}{near[0]}?" if near else "")
        )
    return found
