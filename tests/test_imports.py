"""Imports point down only, and the core needs nothing but the standard library."""

import ast
import pydoc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import headgate

PACKAGE = Path(headgate.__file__).parent

# From the ground up. A module may import from its own line and from those above it; the longest name that fits counts.
LAYERS = [
    ["errors", "_mypyc", "_lifecycle"],
    ["quota", "decision", "clock", "keys", "_plan"],
    ["telemetry"],
    ["algorithms"],
    ["rule"],
    ["_waiters"],
    ["stores.base", "stores.key_table"],
    ["stores.memory_joint"],
    ["stores", "stores.memory", "stores.memory_booking", "stores.thread_pool"],
    ["fallback", "stores.remote", "stores.remote_joint", "stores.remote_store"],
    ["stores.agreement", "stores.majority", "stores.failover", "stores.polling", "stores.several"],
    ["redis", "postgresql"],
    ["remote", "stores.resp_store"],
    ["stores.redis", "stores.shared", "stores.postgresql", "stores.service"],
    ["booking", "decorators"],
    ["limiter"],
    ["joint"],
    ["hybrid"],
    ["jobs"],
    ["simulate"],
    ["coordination"],
    ["budget"],
    ["clients"],
    ["limits"],
    ["web"],
    ["testing", "service"],
    ["replay", "inspection"],
    ["cli", "__main__"],
    [""],  # the package itself: public names, nothing else
]
LEVELS = {name: level for level, names in enumerate(LAYERS) for name in names}


def level(module: str) -> int:
    """Where *module*, such as `stores.memory`, stands."""
    parts = module.split(".") if module else []
    for end in range(len(parts), 0, -1):
        if (name := ".".join(parts[:end])) in LEVELS:
            return LEVELS[name]
    assert not parts, f"headgate.{module} has no place in LAYERS: say where it stands"
    return LEVELS[""]


def modules() -> list[str]:
    paths = (path.relative_to(PACKAGE).with_suffix("") for path in PACKAGE.rglob("*.py"))
    return sorted(".".join(path.parts).removesuffix("__init__").removesuffix(".") for path in paths)


def imported(module: str) -> Iterator[str]:
    """What *module* imports of ours when it is imported itself: not for types alone, not inside functions."""
    path = PACKAGE / module.replace(".", "/")
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    pending: list[ast.stmt] = list(ast.parse(source.read_text(encoding="utf-8")).body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending += node.orelse
        elif isinstance(node, ast.If | ast.Try | ast.ClassDef | ast.With):
            pending += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"headgate.{module} imports by a relative name"
            yield node.module or ""
            yield from (f"{node.module}.{name.name}" for name in node.names)


@pytest.mark.parametrize("module", modules())
def test_imports_point_down(module: str) -> None:
    own = level(module)
    for name in imported(module):
        target = name.removeprefix("headgate.")
        if name.startswith("headgate.") and _is_module(target):
            assert level(target) <= own, f"headgate.{module} imports headgate.{target}, which stands above it"


def _is_module(name: str) -> bool:
    path = PACKAGE / name.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").is_file()


def python(code: str) -> str:
    """What a fresh interpreter prints that runs *code*."""
    command = [sys.executable, "-X", "importtime", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=50, check=True).stdout


CORE = """
import sys
before = set(sys.modules)
from headgate import AsyncLimiter, Limiter, Quota
assert Limiter(Quota(5, 1.0)).try_acquire("k")
assert Limiter(["5/s", "6/m"], algorithm="sliding_window").try_acquire("k")
AsyncLimiter("5/s")
tops = {name.partition(".")[0] for name in set(sys.modules) - before}
compiled = {name for name in tops if name.endswith("__mypyc")}
print(*sorted(tops - compiled - set(sys.stdlib_module_names) - {"headgate"}))
"""


def test_core_has_no_dependencies() -> None:
    assert python(CORE) == "\n"


NO_REDIS = """
import sys
for name in ("redis", "redis.asyncio", "hiredis"):
    sys.modules[name] = None
from functools import partial
from headgate import Limiter
from headgate.coordination import CircuitBreaker, Lock, Pool, Semaphore, WaitQueue
assert Limiter("5/s").try_acquire("k")
for door in (Limiter, CircuitBreaker, Lock, Pool, WaitQueue, partial(Semaphore, limit=1)):
    try:
        door("5/s", store="redis://localhost:1")
    except ImportError as error:
        print(error)
"""


def test_without_redis_py() -> None:
    """The error names the extra to install."""
    assert python(NO_REDIS).count("headgate[redis]") == 6


NO_HYBRID = """
import sys
for name in ("redis", "redis.asyncio", "hiredis"):
    sys.modules[name] = None
from headgate import *
from headgate import AsyncHybridLimiter, HybridLimiter
for door in (HybridLimiter, AsyncHybridLimiter):
    try:
        door("5/s", store="redis://localhost:1")
    except ImportError as error:
        print(door.__name__, error)
"""


def test_hybrid_without_redis_py() -> None:
    """A hybrid limiter can be imported, and says what it needs when it is made."""
    said = python(NO_HYBRID).splitlines()
    assert [line.split()[0] for line in said] == ["HybridLimiter", "AsyncHybridLimiter"]
    assert all("headgate[redis]" in line for line in said)


NO_SERVICE = """
import sys
sys.modules["granian"] = sys.modules["msgspec"] = None
import importlib.util
from headgate.cli import main
try:
    main(["config", "validate"])
except SystemExit as error:
    print(error)
"""


def test_without_granian() -> None:
    """The error names the extra to install."""
    assert "headgate[service]" in python(NO_SERVICE)


NO_CONNECTION = """
import socket
def refuse(*arguments):
    raise SystemExit("connected")
socket.socket.connect = socket.create_connection = refuse
import headgate, headgate.stores.redis
from headgate import AsyncLimiter, Limiter
Limiter("5/s", store="redis://localhost:1").close()
AsyncLimiter("5/s", store="redis://localhost:1")
print("nothing connected")
"""


def test_no_early_connection() -> None:
    """To make a limiter connects to nothing."""
    assert python(NO_CONNECTION) == "nothing connected\n"


def test_public_names() -> None:
    for name in headgate.__all__:
        assert hasattr(headgate, name)
    assert {"Limiter", "AsyncLimiter", "Quota", "Decision"} <= set(headgate.__all__)
    assert headgate.__version__
    assert headgate.COMPILED in (True, False)


def test_dir_and_help() -> None:
    """They show the public names, and no others."""
    assert set(headgate.__all__) <= set(dir(headgate))
    assert not {"Any", "TYPE_CHECKING", "find_spec"} & set(dir(headgate))
    text = pydoc.plain(pydoc.render_doc(headgate))
    assert "class HybridLimiter" in text and "class Limiter" in text


def test_names_of_stores() -> None:
    from headgate.stores import MemoryStore, RedisStore

    assert MemoryStore.__module__ == "headgate.stores.memory"
    assert RedisStore.__module__ == "headgate.stores.redis"
    with pytest.raises(ImportError, match="MongoStore"):
        exec("from headgate.stores import MongoStore")
