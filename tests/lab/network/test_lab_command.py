from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
from pathlib import Path

import pytest

from cli_runner import help_text
from laconic_lab.cli import lab as command
from laconic_lab.network import labs

PAGE = Path(__file__).resolve().parents[3] / "docs" / "lab.md"


def one_line(result, code: int, *words: str) -> None:
    assert result.exit_code == code, result.output
    assert len(result.stderr.strip().splitlines()) == 1 and not result.stdout, result.output
    for word in words:
        assert word in result.stderr, result.stderr


@pytest.mark.parametrize(
    "words", [("lab",), ("lab", "up"), ("lab", "run"), ("lab", "status"), ("lab", "down")], ids=str
)
def test_help_shows_examples(run, words):
    shown = help_text(run, *words)
    mine = [example for example in command.EXAMPLES if example.startswith(" ".join(("laconic", *words)))]
    assert len(mine) >= 2 and all(f"$ {example}" in shown for example in mine)


def test_help_examples_run_in_order(run, name, monkeypatch, capfd):
    monkeypatch.setattr(command, "DEFAULT", name)
    for example in command.EXAMPLES:
        words = shlex.split(example.replace("far", name))[1:]
        if words[1] == "up" and "--name" not in words:
            words += ["--name", f"{name}-first", "--no-measure"]
        if words[-1] == "--stale" or words[1] == "replicas" or "--tier" in words:
            continue  # about labs of others; about torchft, for minutes; for hours
        result = run(*words)
        assert result.exit_code == 0, result.output
        if "--json" in words:
            assert isinstance(json.loads(result.stdout), dict)
    assert run("lab", "down", "--name", f"{name}-first").exit_code == 0
    assert "inet 10.77.0.2/24 scope global eth0" in capfd.readouterr().out
    assert not {name, f"{name}-first"} & set(labs())


def test_commands_of_the_lab_page_run(run, name, capfd):
    text = PAGE.read_text()
    (shell,) = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    for line in shell.splitlines():
        if shutil.which("nft") is None and shutil.which("nft", path="/usr/sbin:/sbin") is None:
            line = line.replace(" --loss 0.1", "")  # packet loss needs nftables
        words = shlex.split(line.split("  #")[0].replace("demo", name))[1:]
        if words[-1] != "--stale":
            result = run(*words, *(["--no-measure"] if words[1] == "up" else []))
            assert result.exit_code == 0, (line, result.output)
    (code,) = re.findall(r"^```py\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    exec(compile(code, str(PAGE), "exec"), {})
    assert "hello from 2" in capfd.readouterr().out


def test_up_run_status_and_down_work_together(run, name, capfd):
    up = run("lab", "up", "--name", name, "--hosts", 2, "--rate", "100mbit", "--json")
    assert up.exit_code == 0, up.output
    made = json.loads(up.stdout)
    assert made["name"] == name and [host["address"] for host in made["hosts"]] == ["10.77.0.1", "10.77.0.2"]
    assert [(link["from"], link["to"]) for link in made["links"]] == [(1, 2), (2, 1)]
    for link in made["links"]:
        assert link["rate"] == 100e6 and link["expected"] == pytest.approx(95.6e6) and link["congestion"]
        assert link["valid"] or "not every link" in up.stderr
    one_line(run("lab", "up", "--name", name), 2, f"lab '{name}' exists already", "laconic lab down")

    fill = "test {address} = 10.77.0.{host} -a {rank}{hosts} = 12 && ip -o address show eth0"
    assert run("lab", "run", "--name", name, "--host", 2, "--", "sh", "-c", fill).exit_code == 0
    assert "10.77.0.2/24" in capfd.readouterr().out
    assert run("lab", "run", "--name", name, "--host", 1, "--", "sh", "-c", "exit 7").exit_code == 7
    assert (
        run("lab", "run", "--name", name, "--host", 1, "--", "sh", "-c", "kill -9 $$").exit_code == 128 + signal.SIGKILL
    )
    everywhere = run("lab", "run", "--name", name, "--all", "--", "sh", "-c", "echo {address}; exit {rank}")
    assert sorted(everywhere.stdout.splitlines()) == ["1: 10.77.0.1", "2: 10.77.0.2"]
    assert everywhere.exit_code == 1 and everywhere.stderr == "laconic: host 2: exit code 1\n"

    status = json.loads(run("lab", "status", "--name", name, "--json").stdout)
    (shown,) = status["labs"]
    assert shown["name"] == name and shown["owner"] is None and not shown["stale"]
    assert shown["hosts"][0]["tx_bytes"] > 1e6 and shown["hosts"][0]["rate"] == "100mbit"
    assert name in run("lab", "status").stdout

    down = run("lab", "down", "--name", name, "--json")
    assert json.loads(down.stdout) == {"removed": [name]}
    one_line(run("lab", "down", "--name", name), 2, f"there is no lab '{name}'")
    one_line(run("lab", "status", "--name", name), 2, f"there is no lab '{name}'")
    one_line(run("lab", "run", "--name", name, "--host", 1, "--", "true"), 2, f"there is no lab '{name}'")


def test_wrong_arguments_give_one_line(run, name):
    for words, said in [
        (("up", "--rate", "100"), "a rate is a number and one of"),
        (("up", "--delay", "5"), "a time is a number and one of"),
        (("up", "--loss", "101"), "loss must be a percentage"),
        (("up", "--hosts", "0"), "1 to 250 hosts"),
        (("up", "--congestion", "no"), "congestion control 'no' is not allowed"),
        (("run", "--", "true"), "either --host I or --all"),
        (("run", "--host", "1", "--all", "--", "true"), "either --host I or --all"),
        (("down", "--stale"), "either --name or --stale"),
    ]:
        one_line(run("lab", words[0], "--name", name, *words[1:]), 2, said)
    assert name not in labs()
    assert run("lab", "up", "--name", name, "--hosts", 1).exit_code == 0
    one_line(run("lab", "run", "--name", name, "--host", 2, "--", "true"), 2, "hosts 1 to 1, got 2")


def test_unnamed_lab_is_the_only_or_the_default_one(run, monkeypatch):
    for up, chosen in (["only"], "only"), (["a", "lab"], "lab"):
        monkeypatch.setattr("laconic_lab.network.labs", lambda up=up: up)
        assert command._chosen(None) == chosen and command._chosen("b") == "b"
    monkeypatch.setattr("laconic_lab.network.labs", lambda: ["a", "b"])
    one_line(run("lab", "down"), 2, "several labs exist: --name one of a, b")
    monkeypatch.setattr("laconic_lab.network.labs", list)
    one_line(run("lab", "run", "--host", 1, "--", "true"), 2, "no lab exists")


def test_every_command_without_root_gives_one_line(run, monkeypatch):
    monkeypatch.setattr("laconic_lab.network.tools.shutil.which", lambda program, path=None: f"/sbin/{program}")
    monkeypatch.setattr("laconic_lab.network.tools.os.geteuid", lambda: 1000)
    for words in (("up",), ("status",), ("down",), ("down", "--stale"), ("run", "--host", 1, "--", "true")):
        one_line(run("lab", *words), 2, "network namespaces need root")
    one_line(run("lab", "status", "--name", "x"), 2, "network namespaces need root")
