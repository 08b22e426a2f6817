from __future__ import annotations

import json
import shlex
import shutil
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from cli_runner import Run, assert_error, file_names, help_text
from laconic.cli import certs
from laconic.cluster import security

pytest.importorskip("cryptography")

NEW = ("certs", "new", "job", "--job", "digits", "--host", "ps.example.org", "--host", "10.0.0.5", "--workers", "2")


@pytest.mark.parametrize("command", [("certs",), ("certs", "new"), ("certs", "show"), ("certs", "deny")], ids=" ".join)
def test_help_shows_the_examples(run: Run, command: tuple[str, ...]) -> None:
    shown = help_text(run, *command)
    expected = [example for example in certs.EXAMPLES if example.startswith(" ".join(("laconic", *command)))]
    assert len(expected) >= 2 and all(f"$ {example}" in shown for example in expected)
    assert run("certs").stdout == run("certs", "--help").stdout


def test_examples_run_in_their_order(run: Run, work_dir: Path) -> None:
    for example in certs.EXAMPLES:
        result = run(*shlex.split(example)[1:])
        assert result.exit_code == 0 and result.stdout, result.output
        if "--json" in example:
            assert isinstance(json.loads(result.stdout), dict)
    assert file_names() == ["certs", "lab"]


def test_new_lists_the_files_for_each_host(run: Run, work_dir: Path) -> None:
    result = run(*NEW)
    assert result.exit_code == 0 and file_names() == ["job"]
    for word in ("wrote job", "ca.pem, server.pem, server.key", "worker-1", "ps.example.org", "10.0.0.5", "good"):
        assert word in result.stdout
    assert security.load_worker("job", 1).identity.job == "digits"


def test_show_lists_owner_expiry_and_hosts(run: Run, work_dir: Path) -> None:
    created = json.loads(run(*NEW, "--days", "7", "--json").stdout)
    shown = json.loads(run("certs", "show", "job", "--json").stdout)
    assert shown == created and shown["folder"] == "job"
    server, first, second = shown["certificates"]
    assert (server["job"], server["role"], server["worker"]) == ("digits", "server", None)
    assert [(worker["role"], worker["worker"], worker["hosts"]) for worker in (first, second)] == [
        ("worker", 0, []),
        ("worker", 1, []),
    ]
    assert {"ps.example.org", "10.0.0.5", "localhost"} <= set(server["hosts"]) and server["fault"] is None
    until = datetime.fromisoformat(server["until"])
    assert timedelta(days=6.9) < until - datetime.now(timezone.utc) <= timedelta(days=7)
    text = run("certs", "show", "job").stdout
    assert f"{until:%Y-%m-%d}" in text and "worker-1" in text and "ps.example.org" in text


def test_show_explains_unusable_certificates(run: Run, work_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(*NEW)
    Path("job/worker-0.key").unlink()
    shutil.copy("job/server.pem", "job/worker-1.pem")
    Path("job/worker-2.pem").write_text("nothing")
    result = run("certs", "show", "job", "--json")
    server, *others = json.loads(result.stdout)["certificates"]
    assert result.exit_code == 1 and server["fault"] is None
    for other, word in zip(others, ("worker-0.key", "it is that of", "must be an undamaged certificate"), strict=True):
        assert word in other["fault"]
    assert "it is that of" in run("certs", "show", "job").stdout
    later = datetime.now(timezone.utc) + timedelta(days=400)
    monkeypatch.setattr(security, "utc_now", lambda: later)
    result = run("certs", "show", "job")
    assert result.exit_code == 1 and "expired on" in result.stdout


def test_invalid_input_is_one_line(run: Run, work_dir: Path) -> None:
    assert_error(run("certs", "show", "job"), 1, "no such folder: job", "laconic certs new")
    assert_error(run(*NEW, "--host", "ps:50051"), 2, "without port", "'ps:50051'")
    assert_error(run(*NEW[:-1], "0"), 2, "workers must be an integer from 1 to 4096, got 0")
    assert_error(run(*NEW[:-1], "many"), 2, "--workers")
    assert_error(run(*NEW, "--days", "0"), 2, "days must be")
    assert_error(run("certs", "new", "job", "--job", "a b", "--host", "h", "--workers", "1"), 2, "job's name", "'a b'")
    assert_error(run("certs", "new", "job", "--job", "a", "--workers", "1"), 2, "--host")
    assert_error(run("certs", "new", "no/job", *NEW[3:]), 1, "cannot make certificates in no/job")
    assert_error(run("certs", "nothing"), 2, "nothing")
    assert file_names() == []
    Path("job").mkdir()
    assert_error(run("certs", "show", "job"), 1, "no such file: job/ca.pem")
    assert run(*NEW).exit_code == 0
    before = {path.name: path.read_bytes() for path in Path("job").iterdir()}
    assert_error(run(*NEW), 1, "job exists and is not an empty folder")
    assert {path.name: path.read_bytes() for path in Path("job").iterdir()} == before and file_names() == ["job"]
    for path in Path("job").glob("[sw]*"):
        path.unlink()
    assert_error(run("certs", "show", "job"), 1, "contains a CA's certificate only")
