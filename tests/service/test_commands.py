"""The command line: what it says, to whom, and with which exit code."""

import hashlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from headgate.cli import main
from tests.service.test_rules import EXAMPLE
from tests.support.service import headgate


@pytest.mark.slow
def test_a_bad_file_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "headgate.toml").write_text("[rules.a]\nquotas = 'x'\n")
    done = headgate("serve", "--port", "0", folder=tmp_path)
    assert done.returncode == 5 and "headgate.toml:2: rules.a.quotas: cannot read the quota 'x'" in done.stderr
    done = headgate("serve", "--config", "missing.toml", folder=tmp_path)
    assert done.returncode == 5 and "missing.toml" in done.stderr
    done = headgate("serve", "--store", "nope://x", folder=tmp_path.parent)
    assert done.returncode == 5 and "redis://" in done.stderr


def test_validate(tmp_path: Path) -> None:
    assert headgate("config", "validate", str(EXAMPLE), folder=tmp_path).returncode == 0
    (tmp_path / "bad.toml").write_text("port = 'x'\n")
    done = headgate("config", "validate", "bad.toml", folder=tmp_path)
    assert done.returncode == 5 and done.stderr.startswith("bad.toml:1: port: ")
    (tmp_path / "bad.toml").write_text("store = 'redis://localhost:6379/0?nonsense=1'\n")
    done = headgate("config", "validate", "bad.toml", folder=tmp_path)
    assert done.returncode == 5 and "nonsense" in done.stderr


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        done = headgate("serve", "--port", where.partition(":")[2], folder=tmp_path)
    assert done.returncode == 1 and where in done.stderr


def test_show_hides_secrets(tmp_path: Path) -> None:
    url = "redis://me:secret@db:6379/0?password=secret"
    (tmp_path / "headgate.toml").write_text(f"store = '{url}'\n[rules.a]\nquotas='1/s'\n")
    done = headgate("config", "show", folder=tmp_path, environment={"HEADGATE_ADMIN_TOKEN": "hush"})
    shown = json.loads(done.stdout)
    assert shown["store"] == "redis://***@db:6379/0?password=***" and shown["rules"]["a"]["quotas"] == "1/s"
    assert shown["tokens"][0]["scope"] == "admin" and "hush" not in done.stdout


def test_schema(tmp_path: Path) -> None:
    schema = json.loads(headgate("config", "schema", folder=tmp_path).stdout)
    assert "trusted_proxies" in schema["$defs"]["Settings"]["properties"]


def test_token(tmp_path: Path) -> None:
    _, token, _, digest = headgate("token", folder=tmp_path).stdout.split()
    assert len(token) >= 40 and hashlib.sha256(token.encode()).hexdigest() == digest


def test_help_without_a_command(tmp_path: Path) -> None:
    done = headgate(folder=tmp_path)
    assert done.returncode == 0 and "serve" in done.stdout


@pytest.mark.parametrize(
    "line, says",
    [
        ("serve --prot 80", "unrecognized arguments: --prot 80; did you mean --port?"),
        ("serve --prot=80", "did you mean --port?"),
        ("serve ex.toml", "unrecognized arguments: ex.toml; a file of settings is given as --config ex.toml"),
        ("serve --nothing-like-it", "unrecognized arguments: --nothing-like-it\n"),
        ("config validate a.toml b.toml", "unrecognized arguments: b.toml\n"),
        ("config show --confg a.toml", "did you mean --config?"),
        ("token 5", "unrecognized arguments: 5\n"),
    ],
)
def test_wrong_argument(line: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong argument is answered with the usage of its own command."""
    with pytest.raises(SystemExit) as end:
        main(line.split())
    said = capsys.readouterr().err
    command = " ".join(word for word in line.split()[:2] if word in ("serve", "config", "validate", "show", "token"))
    assert end.value.code == 2 and said.startswith(f"usage: headgate {command} [-h]"), said
    assert says in said


def test_a_word_before_the_command_too(tmp_path: Path) -> None:
    done = headgate("--verison", folder=tmp_path)
    assert done.returncode == 2 and "did you mean --version?" in done.stderr


@pytest.mark.parametrize("words", [["config", "schema"], ["--help"], ["--version"], [], ["token"]])
def test_nobody_reads_to_the_end(words: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        command = [sys.executable, "-m", "headgate", *words]
        # argparse says nothing of a text that cannot be written at once
        buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, env=buffered, text=True, timeout=50)
    finally:
        os.close(writer)
    assert done.stderr == "" and done.returncode == 141  # as a shell shows SIGPIPE


def test_one_rule_is_one(tmp_path: Path) -> None:
    (tmp_path / "headgate.toml").write_text("[rules.a]\nquotas = '1/s'\n")
    assert headgate("config", "validate", folder=tmp_path).stdout == "headgate.toml: fine, 1 rule\n"
    (tmp_path / "headgate.toml").write_text("")
    assert headgate("config", "validate", folder=tmp_path).stdout == "headgate.toml: fine, 0 rules\n"


def test_help(tmp_path: Path) -> None:
    """The help names no file that an installed package lacks."""
    done = headgate("serve", "--help", folder=tmp_path)
    text = " ".join(done.stdout.split())
    assert done.returncode == 0 and "docs/" not in text
    assert "HEADGATE_PORT" in text and "headgate config schema" in text
