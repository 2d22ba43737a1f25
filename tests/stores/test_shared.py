"""What is particular to the shared store: its files, its bound, forks, and words that make no sense."""

import os
import random
import shutil
import stat
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headgate import Limiter
from headgate.errors import StoreUnavailable
from headgate.rule import Rule
from headgate.stores import MemoryStore, SharedStore
from headgate.stores.shared import files, tables
from headgate.stores.shared.backend import SharedInteger, SharedLog, SharedRule, SharedStates
from headgate.stores.shared.layout import EPOCH_AT, HEAD, LAYOUT, PAGE, SLOTS, geometry_for
from headgate.stores.shared.states import StateWords
from headgate.testing import ManualClock
from tests.support.clocks import until
from tests.support.quotas import LAWS, law

PROJECT = Path(__file__).parent.parent.parent


@pytest.fixture
def directory() -> Iterator[Path]:
    """An empty directory in memory, if the machine has a place for that."""
    root = Path("/dev/shm" if os.path.isdir("/dev/shm") else "/tmp") / f"headgate-test-{os.getpid()}"
    root.mkdir(mode=0o700)
    yield root
    shutil.rmtree(root)


def limiter_at(directory: Path, quota: Any = "5/hour", **options: Any) -> Limiter:
    store = {name: options.pop(name) for name in ("clock", "max_keys") if name in options}
    options = {"on_store_error": "raise", **options}
    return Limiter(quota, store=SharedStore(f"shared://{directory}", **store), **options)


def only_file(directory: Path) -> Path:
    [path] = directory.iterdir()
    return path


def run(code: str, *arguments: object) -> str:
    """What another process prints that runs *code* with this build of headgate."""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code, *map(str, arguments)]
    return subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=60, check=True).stdout


# -------------------------------------------------------------------------------------------------------- its place


def test_a_name_is_a_directory_in_memory() -> None:
    name = f"test-{os.getpid()}"
    limiter = Limiter("5/hour", store=f"shared://{name}")
    place = files.home() / name
    try:
        assert limiter.try_acquire("k")
        assert stat.S_IMODE(place.stat().st_mode) == stat.S_IMODE(place.parent.stat().st_mode) == 0o700
        assert stat.S_IMODE(only_file(place).stat().st_mode) == 0o600
    finally:
        shutil.rmtree(place)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("shared://", "shared://name"),
        ("shared:///", "names no directory"),
        ("shared://a/b", "shared://name"),
        ("shared://..", "shared://name"),
        ("shared://a b", "shared://name"),
        ("shared://a?timeout=2", r"only \?max_keys="),
        ("shared://a?max_keys=no", "at least 1"),
        ("shared://a?max_keys=0", "at least 1"),
    ],
)
def test_urls_that_are_wrong(url: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Limiter("5/hour", store=url)


def test_max_keys_is_chosen_once(directory: Path) -> None:
    """By an argument or in the URL; the process that opens the file later takes it as it is."""
    first = Limiter("5/hour", store=f"shared://{directory}?max_keys=5000")
    second = limiter_at(directory, max_keys=10)
    for limiter in (first, second):
        backend: Any = limiter._backend
        assert backend.file.max_keys == 5000
    with pytest.raises(ValueError, match="max_keys"):
        limiter_at(directory, max_keys=True)


@pytest.mark.parametrize("keys", [1_000_000, 10_000_000])
def test_bytes_for_a_key(keys: int) -> None:
    """At most 80 bytes a key for states of one word, everything included."""
    assert geometry_for(0, 0, 0, keys)[0].file_bytes / keys <= 80


def test_logs_of_large_limits_fit() -> None:
    """Space for a log is taken as it grows, not when the file is made."""
    rule = Rule("1000000/day", "sliding_window")
    words = StateWords(rule.algorithm)
    geometry, keys = geometry_for(words.header, words.near, words.far, None)
    assert keys >= 1000 and geometry.table_bytes < 1_000_000
    with pytest.raises(ValueError, match="max_keys="):
        geometry_for(words.header, words.near, words.far, 10_000_000)


# ------------------------------------------------------------------------------------------------- files that are wrong


def patch(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def _replace_by_link(path: Path) -> None:
    target = path.with_name("elsewhere")
    path.rename(target)
    path.symlink_to(target)


def _replace_by_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _replace_by_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def _replace_by_other(path: Path) -> None:
    other = limiter_at(path.parent, "6/hour")
    backend: Any = other._backend
    shutil.copyfile(backend.file.path, path)


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda path: os.truncate(path, 0), "truncated"),
    "shorter": (lambda path: os.truncate(path, path.stat().st_size - 4096), "truncated to"),
    "foreign": (lambda path: path.write_bytes(b"#!/bin/sh\n" * 1000), "not a file of headgate"),
    "other layout": (lambda path: patch(path, 8, struct.pack("=Q", LAYOUT + 1)), f"layout {LAYOUT + 1}"),
    "other byte order": (lambda path: patch(path, 24, bytes(range(1, 9))), "byte order"),
    "damaged sizes": (lambda path: patch(path, 32, struct.pack("=Q", 12345)), "makes no sense"),
    "unknown mode": (lambda path: patch(path, 16, struct.pack("=Q", 7)), "makes no sense"),
    "link": (_replace_by_link, "symbolic link"),
    "directory": (_replace_by_directory, "directory"),
    "fifo": (_replace_by_fifo, "not a regular file"),
    "others may write": (lambda path: path.chmod(0o666), "its mode must be 600"),
    "of another limiter": (_replace_by_other, "another limiter"),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("policy", ["allow", "raise"])
def test_wrong_files_are_refused(wrong: str, policy: str, directory: Path) -> None:
    """The error says what is wrong, whatever the policy is, and the file is left as it is."""
    limiter_at(directory)
    tables._open.clear()
    path = only_file(directory)
    change, says = WRONG[wrong]
    change(path)
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(StoreUnavailable, match=says) as caught:
        limiter_at(directory, on_store_error=policy)
    assert str(path) in str(caught.value)
    assert before is None or path.read_bytes() == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_files_of_other_users_are_refused(directory: Path) -> None:
    limiter_at(directory)
    tables._open.clear()
    os.chown(only_file(directory), 12345, -1)
    with pytest.raises(StoreUnavailable, match="belongs to user 12345"):
        limiter_at(directory)
    os.chown(directory, 12345, -1)
    with pytest.raises(StoreUnavailable, match="belongs to user 12345"):
        SharedStore(f"shared://{directory}")


def test_a_directory_that_others_may_write_to_is_refused(directory: Path) -> None:
    directory.chmod(0o777)
    with pytest.raises(StoreUnavailable, match="set its mode to 700"):
        SharedStore(f"shared://{directory}")


@pytest.mark.parametrize("kind", ["nfs4", "nfs", "cifs", "fuse.sshfs", "fuse", "9p", "virtiofs", "ceph"])
def test_file_systems_that_machines_share_are_refused(
    kind: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "file_system", lambda path: kind)
    with pytest.raises(StoreUnavailable, match=f"type {kind}"):
        SharedStore(f"shared://{directory}")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the system does not say")
def test_the_type_of_a_file_system() -> None:
    assert files.file_system(Path("/proc/self")) == "proc"
    assert files.file_system(Path("/dev/shm")) in ("tmpfs", "")


def test_left_overs_of_a_killed_process_go(directory: Path) -> None:
    """A process that was killed while it made a file leaves one under another name; the next one removes it."""
    limiter_at(directory)
    path = only_file(directory)
    tables._open.clear()
    left = path.with_name(f".{path.name}.1-abc")
    path.rename(left)
    limiter_at(directory)
    assert only_file(directory) == path


# --------------------------------------------------------------------------------------------------- builds that meet


def test_plain_python_refuses_an_atomic_file(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limiter_at(directory)
    tables._open.clear()
    patch(only_file(directory), 16, struct.pack("=Q", 1))
    monkeypatch.setattr(files, "native", None)
    with pytest.raises(StoreUnavailable, match="a compiled headgate has made it"):
        limiter_at(directory)


def test_a_compiled_build_joins_a_locked_file(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both count in the same file, under the locks that plain Python can take."""
    with monkeypatch.context() as patched:
        patched.setattr(files, "native", None)
        plain = limiter_at(directory)
        assert [plain.try_acquire("k").allowed for _ in range(3)] == [True] * 3
    tables._open.clear()
    compiled = limiter_at(directory)
    assert compiled.health().version == "locked"
    assert [bool(each.try_acquire("k")) for each in (compiled, plain, compiled, plain)] == [True, True, False, False]


# ----------------------------------------------------------------------------------------------- files that disappear


@pytest.mark.slow
def test_a_file_that_was_removed_is_made_anew(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Noticed within about a second, and logged once."""
    limiter = limiter_at(directory)
    for _ in range(2):
        while limiter.try_acquire("k"):
            pass
        only_file(directory).unlink()
        until(lambda: limiter.try_acquire("k").allowed)
        assert only_file(directory).exists()
    assert sum("was removed or replaced" in record.message for record in caplog.records) == 1
    assert not limiter.try_acquire("k", 5)


@pytest.mark.server
def test_two_processes_meet_again_after_a_removal(directory: Path) -> None:
    """Each opens the file that is there now, whichever has made it."""
    limiter = limiter_at(directory, "1000000/hour")
    code = """
import sys
from headgate import Limiter
limiter = Limiter("1000000/hour", store=sys.argv[1], on_store_error="raise")
print("ready", flush=True)
while sys.stdin.readline():
    limiter.try_acquire("k")
    print(limiter.peek("k", 0).remaining, flush=True)
"""
    command = [sys.executable, "-c", code, f"shared://{directory}"]
    with subprocess.Popen(command, cwd=PROJECT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin and other.stdout
        assert other.stdout.readline() == "ready\n"
        only_file(directory).unlink()

        def agree() -> bool:
            assert other.stdin and other.stdout
            limiter.try_acquire("k")
            print(file=other.stdin, flush=True)
            theirs = int(other.stdout.readline())
            return theirs == limiter.peek("k", 0).remaining

        until(lambda: agree() and agree() and agree())
        other.stdin.close()
        other.wait()


def test_a_file_that_cannot_be_opened_anew_is_answered_by_the_policy(directory: Path) -> None:
    limiter = limiter_at(directory, on_store_error="deny")
    assert limiter.try_acquire("k")
    path = only_file(directory)
    path.unlink()
    path.mkdir()
    until(lambda: limiter.try_acquire("k").degraded)
    assert not limiter.health().healthy and limiter.store_health().last_error
    path.rmdir()
    until(lambda: not limiter.try_acquire("k").degraded)
    assert limiter.health().healthy


@pytest.mark.server
@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="only root can make a small file system")
def test_a_full_file_system(directory: Path) -> None:
    """Found when the file is made, or by the policy when a log grows; no process dies of it."""
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", directory], check=False).returncode:
        pytest.skip("may not mount")
    try:
        directory.chmod(0o700)
        with pytest.raises(StoreUnavailable, match="no space is left for"):
            limiter_at(directory, max_keys=100_000)
        assert not list(directory.iterdir())
        limiter = limiter_at(directory, "1000000/day", algorithm="sliding_window", max_keys=1, on_store_error="deny")
        decisions = [limiter.try_acquire("k")]
        while not decisions[-1].degraded:
            decisions.append(limiter.try_acquire("k"))
        assert decisions[0] and not decisions[-1]
        assert "No space left" in limiter.store_health().last_error
        allowed = sum(decision.allowed for decision in decisions)
        assert limiter.peek("k", 0).remaining == 1_000_000 - allowed, "what was granted is still known"
    finally:
        subprocess.run(["umount", "-l", directory], check=True)


# --------------------------------------------------------------------------------------------------------------- time


def test_a_boot_keeps_the_states(directory: Path) -> None:
    """The monotonic clock starts again, and a file on a disk goes on with the time of day."""
    limiter = limiter_at(directory, "5/day")
    assert limiter.try_acquire("k", 5)
    del limiter
    tables._open.clear()
    patch(only_file(directory), EPOCH_AT, struct.pack("=q16s", -(10**15), os.urandom(16)))
    again = limiter_at(directory, "5/day")
    decision = again.try_acquire("k")
    assert not decision and 86_000 < decision.reset_after <= 86_400
    assert again.refund("k", 5) and again.try_acquire("k", 5)


@pytest.mark.server
def test_another_time_namespace(directory: Path) -> None:
    """A container whose monotonic clock is an hour ahead counts by the same time."""
    limiter = limiter_at(directory, "60/minute")
    assert limiter.try_acquire("k", 60)
    code = (
        "import sys; from headgate import Limiter; l = Limiter('60/minute', store=sys.argv[1]); print(l.peek('k', 60))"
    )
    command = ["unshare", "-T", "--monotonic=3600", "--fork", sys.executable, "-c", code, f"shared://{directory}"]
    try:
        inside = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError:
        pytest.skip("no unshare here")
    if inside.returncode:
        pytest.skip(f"no time namespaces here: {inside.stderr:.80}")
    assert "allowed=False" in inside.stdout


# ------------------------------------------------------------------------------------------------------------ its bound


@pytest.mark.parametrize("quotas", ["3/hour", ["3/hour", "9/day"]], ids=["one quota", "several"])
@pytest.mark.parametrize("algorithm", LAWS)
def test_flood(algorithm: str, quotas: Any, directory: Path) -> None:
    """New keys take the slots of keys that have spent least; a key at its limit is never set free."""
    clock = ManualClock()
    limiter = limiter_at(directory, quotas, max_keys=1, clock=clock, **law(algorithm))
    limited = [f"limited {number}" for number in range(20)]
    assert all(limiter.try_acquire(key, 3) for key in limited)
    for number in range(400):
        assert limiter.try_acquire(f"flood {number}")
        if number % 50 == 0:
            clock.advance(0.1)
            assert not any(limiter.try_acquire(key) for key in limited)
    assert len(limiter.store) <= SLOTS  # type: ignore[arg-type]  # a SharedStore has one
    assert not any(limiter.try_acquire(key) for key in limited)


@pytest.mark.parametrize("quotas", ["1/minute", ["1/minute", "5/hour"]], ids=["one quota", "several"])
@pytest.mark.parametrize("algorithm", LAWS)
def test_full(algorithm: str, quotas: Any, directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Full of keys at their limit, it refuses new keys until there is room; a peek says the same."""
    clock = ManualClock()
    limiter = limiter_at(directory, quotas, max_keys=1, clock=clock, **law(algorithm))
    assert all(limiter.try_acquire(f"first {number}") for number in range(SLOTS))
    for number in range(20):
        expected = limiter.peek(f"later {number}")
        decision = limiter.try_acquire(f"later {number}")
        assert decision == expected
        assert not decision and not decision.degraded and decision.remaining == 0
        assert 0 < decision.retry_after <= 7200
        assert limiter.peek(f"later {number}", 0).allowed
    assert sum("new keys are denied" in record.message for record in caplog.records) == 1
    clock.advance(decision.retry_after)
    assert limiter.try_acquire("newcomer"), "retry_after is true here too"


# -------------------------------------------------------------------------------------------------- one law, two forms


@pytest.mark.parametrize(
    ("quota", "algorithm", "kind", "plain"),
    [
        *[(quota, "token_bucket", SharedInteger, SharedRule) for quota in ("7/second", "10/minute burst 30", "1/hour")],
        *[("7/second", name, SharedInteger, SharedRule) for name in ("fixed_window", "first_window")],
        *[(quota, "sliding_window_counter", SharedInteger, SharedRule) for quota in ("7/second", "30/minute")],
        *[(quota, "sliding_window", SharedLog, SharedStates) for quota in ("7/second", "40/second", "1000/minute")],
    ],
)
def test_written_out(quota: str, algorithm: str, kind: type, plain: Callable[..., SharedRule], directory: Path) -> None:
    """What is written out for speed answers as the plain form does, and as memory does."""
    chance, clock = random.Random(quota), ManualClock()
    quick = limiter_at(directory, quota, clock=clock, **law(algorithm))
    memory = Limiter(quota, store=MemoryStore(clock=clock), **law(algorithm))
    backend: Any = quick._backend
    file = backend.file
    assert type(backend) is kind
    generic = plain(file, quick.rule, clock, "raise")
    for _ in range(2000):
        permits = chance.randint(1, quick.rule.capacity) if chance.random() < 0.3 else 1
        expected = memory.try_acquire("k", permits)
        chosen: Any = chance.choice([quick, generic])
        assert chosen.peek("k", permits).allowed == expected.allowed
        assert chosen.try_acquire("k", permits) == expected
        if chance.random() < 0.1:
            back = chance.randint(1, 3)
            assert memory.refund("k", back) and chosen.refund("k", back)
        clock.advance(chance.choice([0, 0, 0.000_001, 0.01, 0.3, 2, 100]))


@pytest.mark.parametrize(
    ("quota", "algorithm", "kind"),
    [
        ("100/minute", "token_bucket", SharedInteger),
        ("100/minute", "fixed_window", SharedInteger),
        ("100/minute", "sliding_window_counter", SharedInteger),
        ("100/minute", "first_window", SharedInteger),
        ("100/minute", "sliding_window", SharedLog),
        (["1/second", "5/minute"], "sliding_window", SharedStates),
        ("1234567/day", "gcra", SharedStates),
        ("100000/second", "sliding_window_counter", SharedStates),
        (["1/second", "5/minute"], "token_bucket", SharedStates),
    ],
)
def test_the_size_of_a_state(quota: Any, algorithm: str, kind: type, directory: Path) -> None:
    """One word where it fits, more where it does not."""
    assert type(limiter_at(directory, quota, max_keys=10, **law(algorithm))._backend) is kind


# -------------------------------------------------------------------------------------------- words that make no sense


@pytest.mark.parametrize("quotas", ["5/hour", ["5/hour", "9/day"], "40/hour", "100000/second"], ids=str)
@pytest.mark.parametrize("algorithm", LAWS)
def test_random_words(algorithm: str, quotas: Any, directory: Path) -> None:
    """Whatever is written into the slots: no error, never more than a fresh key has, and in time all is well again."""
    chance, clock = random.Random(f"{algorithm} {quotas}"), ManualClock()
    limiter = limiter_at(directory, quotas, max_keys=1, clock=clock, **law(algorithm))
    capacity, backend = limiter.rule.capacity, limiter._backend
    file: Any = backend.file  # type: ignore[attr-defined]  # a SharedRule has one
    sizes = file.geometry
    first, last = sizes.first_set + HEAD + SLOTS, sizes.first_set + sizes.set_words
    for trial in range(60):
        for number in range(3):
            limiter.try_acquire(f"k{number}", min(3, capacity))
        for at in range(first, last):
            if chance.random() < 0.3:
                bits = chance.choice([1, 4, 8, 32, 50, 51, 52, 60, 62, 63, 64])
                file.words[at] = chance.getrandbits(bits) & ~(1 << 63 if trial % 2 else 0)
        for number in range(3):
            key, taken = f"k{number}", 0
            left = limiter.peek(key, 0)
            assert 0 <= left.remaining <= capacity and left.reset_after >= 0
            for permits in (capacity, max(capacity // 2, 1), 1, 1, 1):
                decision = limiter.try_acquire(key, permits)
                taken += permits * decision.allowed
                assert decision.retry_after >= 0 and decision.remaining >= 0
            assert taken <= capacity
            assert limiter.refund(key) and limiter.reset(key)
        clock.advance(chance.choice([0, 1, 4000]))
    clock.advance(4 * 86400)
    assert all(limiter.try_acquire(f"k{number}", capacity) for number in range(3))


# ------------------------------------------------------------------------------------------------------------- forks

FORKS = """
import os, sys, threading
from headgate import Limiter
limiter = Limiter(sys.argv[2].split(","), algorithm=sys.argv[3], store=sys.argv[1], on_store_error="raise")
limiter.try_acquire("warm")
stop = threading.Event()
granted = []

def spend():
    mine = 0
    while not stop.is_set():
        mine += limiter.try_acquire("k").allowed
        limiter.try_acquire(f"new {mine}")
    granted.append(mine)

threads = [threading.Thread(target=spend) for _ in range(3)]
for thread in threads:
    thread.start()
children = []
for number in range(12):
    out, into = os.pipe()
    pid = os.fork()
    if not pid:
        mine = sum(limiter.try_acquire("k").allowed for _ in range(300))
        assert limiter.try_acquire(f"of child {number}")
        os.write(into, b"%d" % mine)
        os._exit(0)
    os.close(into)
    children.append((pid, out))
total = 0
for pid, out in children:
    assert os.waitpid(pid, 0)[1] == 0
    total += int(os.read(out, 20))
stop.set()
for thread in threads:
    thread.join()
while limiter.try_acquire("k"):
    total += 1
print(total + sum(granted))
"""


@pytest.mark.server
@pytest.mark.parametrize(
    ("quotas", "algorithm"),
    [("5000/3660d", "fixed_window"), ("5000/3660d,9000/3660d", "fixed_window"), ("5000/3660d", "sliding_window")],
)
def test_fork_in_threads(quotas: str, algorithm: str, directory: Path) -> None:
    """Processes that are forked while threads spend have places of their own, and all count together."""
    assert run(FORKS, f"shared://{directory}?max_keys=5000", quotas, algorithm) == "5000\n"


ORPHANS = """
import os, signal, sys
from headgate import Limiter
from headgate.stores.shared import files

def seat():
    limiter = Limiter("5/hour", store=sys.argv[1])
    return limiter, limiter._backend.table.seat

out, into = os.pipe()
parent = os.fork()
if not parent:
    limiter, number = seat()
    if not os.fork():
        os.write(into, b"%d %d" % (number, os.getpid()))
    signal.pause()
number, child = map(int, os.read(out, 40).split())
os.kill(parent, signal.SIGKILL)
os.waitpid(parent, 0)
os.kill(child, 0)
print(number == seat()[1])
os.kill(child, signal.SIGKILL)
"""


@pytest.mark.server
@pytest.mark.build("compiled")
def test_a_child_does_not_keep_the_seat_of_its_parent(directory: Path) -> None:
    assert run(ORPHANS, f"shared://{directory}") == "True\n"


def test_the_file_belongs_to_a_page(directory: Path) -> None:
    """Sizes that `_table.c` and layout.py both write down are the same."""
    limiter_at(directory)
    assert only_file(directory).stat().st_size % 8 == 0 and PAGE == 4096
    if files.native is not None:
        assert (files.native.LAYOUT, files.native.SLOTS, files.native.SEATS) == (LAYOUT, SLOTS, 1024)
