"""Compile the hot path to C with mypyc where that works; install the same files as plain Python where it does not.

The table of the shared store is C of our own, and is compiled beside it: all or nothing.

Everything else about the build is in pyproject.toml. Two switches, read from the environment:

    HEADGATE_PURE=1               do not compile
    HEADGATE_REQUIRE_COMPILED=1   fail where the build would otherwise fall back to plain Python

An editable install is plain as well: a compiled module would hide the edits made beside it.
"""

import os
import sys
import sysconfig
import warnings
from glob import glob
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

HOT_PATH = [
    "src/headgate/decision.py",
    "src/headgate/telemetry/counts.py",
    *sorted(glob("src/headgate/algorithms/[!_]*.py")),
    "src/headgate/stores/key_table.py",
    "src/headgate/stores/memory_joint.py",
    "src/headgate/stores/memory.py",
    "src/headgate/stores/shared/states.py",
    "src/headgate/stores/shared/backend.py",
    "src/headgate/budget/amounts.py",
    "src/headgate/budget/records.py",
    "src/headgate/budget/state.py",
    "src/headgate/budget/subjects.py",
    "src/headgate/budget/server_calls.py",
    "src/headgate/budget/hold_plans.py",
    "src/headgate/budget/holds.py",
    "src/headgate/hybrid/inflow.py",
    "src/headgate/hybrid/lease.py",
    "src/headgate/hybrid/fallback_policy.py",
    "src/headgate/hybrid/table.py",
    "src/headgate/web/headers.py",
    "src/headgate/web/hot_fields.py",
    "src/headgate/web/asgi_hot_path.py",
    "src/headgate/web/wsgi_hot_path.py",
    "src/headgate/service/protobuf.py",
    "src/headgate/service/rls_messages.py",
    *sorted(glob("src/headgate/service/http2/[!_]*.py")),
    "src/headgate/service/grpc_calls.py",
]
SHARED_TABLE = Extension(
    "headgate.stores.shared._table", ["src/headgate/stores/shared/_table.c"], extra_compile_args=["-O2"]
)
LIBRARY = "headgate.hot_path"  # all of them in one library, headgate/hot_path__mypyc.*; a shim stands beside each .py
COMMANDS = {"bdist_wheel", "build", "build_ext", "install"}  # others, such as egg_info or sdist, need no C


def switched_on(name: str) -> bool:
    return os.environ.get(name, "") not in ("", "0")


def fall_back(reason: str) -> list[Extension]:
    """Go on without extensions, unless the environment forbids it."""
    if switched_on("HEADGATE_REQUIRE_COMPILED"):
        raise SystemExit(f"error: HEADGATE_REQUIRE_COMPILED is set, but {reason}")
    warnings.warn(f"headgate will be plain Python: {reason}", stacklevel=2)
    return []


def extensions() -> list[Extension]:
    """Translate the hot path to C, if this run of setup.py is one that compiles."""
    if switched_on("HEADGATE_PURE") or COMMANDS.isdisjoint(sys.argv):
        return []
    if sys.implementation.name != "cpython":
        return fall_back("mypyc is only for CPython")
    if sysconfig.get_config_var("Py_GIL_DISABLED") and sys.version_info < (3, 14):
        return fall_back("mypyc is trusted without a global interpreter lock only from Python 3.14 on")
    try:
        from mypyc.build import mypycify

        # No configuration: types are judged by `make types`, and redis may not be here to be checked against.
        options = ["--config-file=", "--follow-imports=silent", "--ignore-missing-imports"]
        found = mypycify([*options, *HOT_PATH], opt_level="3", debug_level="0", group_name=LIBRARY)
    except (Exception, SystemExit) as error:  # SystemExit is how mypyc reports an error in the source
        return fall_back(f"mypyc failed: {error!r}")
    for extension in found:
        # A compiler newer than mypyc may warn of something new; that is no reason to install the slow build.
        extension.extra_compile_args = [arg for arg in extension.extra_compile_args if arg != "-Werror"]
        if sys.platform == "linux":
            # A function that another library cannot replace may be inlined: about a twentieth of a decision.
            extension.extra_compile_args.append("-fno-semantic-interposition")
            extension.extra_link_args = ["-Wl,--strip-all"]
    if sys.platform != "win32" and sys.maxsize > 2**32:  # the table wants POSIX and words of 64 bits
        found.append(SHARED_TABLE)
    return found


class AllOrNothing(build_ext):
    """Build every extension or leave none: a shim without the library behind it could not be imported."""

    def run(self) -> None:
        self.remove_built()  # an earlier build in the same tree may have compiled other modules
        try:
            super().run()
        except Exception as error:
            self.remove_built()
            self.extensions = self.distribution.ext_modules = fall_back(f"the C compiler failed: {error!s:.200}")
            wheel = self.distribution.get_command_obj("bdist_wheel", create=False)
            if wheel:
                wheel.root_is_pure = True  # so that it is named for any platform, like every plain wheel

    def remove_built(self) -> None:
        suffix = sysconfig.get_config_var("EXT_SUFFIX")
        for path in Path(self.build_lib).rglob(f"*{suffix}"):
            path.unlink()


setup(ext_modules=extensions(), cmdclass={"build_ext": AllOrNothing})
