"""``laconic lab up``, ``run``, ``status``, ``down`` and ``faults``."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from laconic.cli.output import examples, print_json, print_stderr, progress_bar, stdout_console
from laconic.errors import ConfigError, LaconicError
from laconic.units import show_bytes
from laconic_lab.cli import lab_faults

if TYPE_CHECKING:
    from laconic_lab.network import Lab, Link

__all__ = ["EXAMPLES", "down", "register", "run", "status", "up"]

UP = ("laconic lab up --hosts 2 --rate 100mbit", "laconic lab up --name far --rate 10mbit --delay 5ms --no-measure")
RUN = (
    "laconic lab run --name far --host 2 -- ip address show eth0",
    "laconic lab run --name far --all -- echo host {host} of rank {rank} is at {address}",
    "laconic lab run --name far --all --json -- echo {address}",
)
STATUS = ("laconic lab status", "laconic lab status --json")
DOWN = ("laconic lab down --name far", "laconic lab down --stale")
EXAMPLES = UP + RUN + STATUS + DOWN + lab_faults.EXAMPLES

DEFAULT = "lab"

Name = Annotated[str | None, typer.Option(metavar="NAME", help="Which lab.", show_default="the one that is up")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def up(
    hosts: Annotated[int, typer.Option(metavar="N", help="How many hosts.")] = 2,
    rate: Annotated[
        str | None, typer.Option(help="Of each host's cable, each way: 100mbit, 1gbit.", show_default="unlimited")
    ] = None,
    delay: Annotated[
        str, typer.Option(help="Added on each cable, each way: two hosts at 5ms are 20 ms apart, there and back.")
    ] = "0",
    loss: Annotated[float, typer.Option(help="Percent of packets that each host loses on arrival.")] = 0.0,
    jitter: Annotated[str, typer.Option(help="At most so much more delay, for each packet anew.")] = "0",
    corrupt: Annotated[
        float, typer.Option(help="Percent of packets on each cable with a bit flipped, unseen by TCP.")
    ] = 0.0,
    congestion: Annotated[
        str | None, typer.Option(help="TCP's congestion control on all hosts.", show_default="the machine's")
    ] = None,
    name: Annotated[str, typer.Option(metavar="NAME", help="Several labs may be up, each with its name.")] = DEFAULT,
    measure: Annotated[
        bool, typer.Option("--measure/--no-measure", help="Measure each cable, both ways: over a second a host.")
    ] = True,
    json: Json = False,
) -> None:
    """Build hosts on one switch out of network namespaces, on this machine.

    They stay until `laconic lab down`. Needs root, and the programs ip and tc
    (and nft for loss). A link is good if its goodput is within 6 % of 0.956 of
    its rate: the rest is headers.
    """
    from laconic_lab.network import Host, Lab

    host = Host(rate=rate, delay=delay, loss=loss, jitter=jitter, corrupt=corrupt)
    lab = Lab(name, [host] * hosts, congestion=congestion)
    lab.up()
    links: list[tuple[int, int, Link]] = []
    try:
        if measure and hosts > 1:
            with progress_bar("measuring") as (bar, task):
                bar.update(task, total=hosts)
                for a in range(1, hosts + 1):  # in a ring: each cable once out and once in
                    b = a % hosts + 1
                    links.append((a, b, lab.measure(a, b, seconds=0.6)))
                    bar.advance(task)
    except BaseException:
        lab.down()
        raise
    if json:
        measured = [{"from": a, "to": b, **link.values()} for a, b, link in links]
        print_json({"name": name, "hosts": _hosts(lab), "links": measured})
    else:
        _print_hosts(lab)
        for a, b, link in links:
            stdout_console().print(f"{a} to {b}: {link}", markup=False, soft_wrap=True)
    if not all(link.valid for _, _, link in links):
        print_stderr(
            "laconic: not every link has the rate asked for: the machine may be busy, or loss and delay hold TCP back"
        )


def run(
    command: Annotated[list[str], typer.Argument(metavar="-- CMD...", help="What to run.")],
    host: Annotated[int | None, typer.Option(metavar="I", help="The host, from 1.")] = None,
    everywhere: Annotated[bool, typer.Option("--all", help="On every host at once.")] = False,
    name: Name = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object, with what was printed in it.")] = False,
) -> None:
    """Run a command on a host, or on all.

    In the command {host} becomes the host's number, {rank} that less one,
    {hosts} how many there are and {address} its address. The exit code is the
    command's; with --all that of the first host where it is not 0.
    """
    from laconic_lab.network import Lab

    if (host is None) != everywhere:
        raise ConfigError("lab run wants either --host I or --all")
    lab = Lab.attach(_chosen(name))
    if host is not None and not json:
        raise typer.Exit(_code(lab.run(host, _filled(lab, host, command)).returncode))
    hosts = list(range(1, len(lab.hosts) + 1)) if host is None else [host]
    output: dict[int, list[str]] = {number: [] for number in hosts}
    tell = (lambda number, line: output[number].append(line)) if json else _print_line
    codes = _run_on(lab, hosts, command, tell)
    if json:
        told = [
            {"host": number, "address": lab.address(number), "exit_code": code, "output": "".join(output[number])}
            for number, code in codes.items()
        ]
        print_json({"name": lab.name, "hosts": told})
    for number, code in codes.items():
        if code != 0:
            print_stderr(f"laconic: host {number}: exit code {code}")
    raise typer.Exit(next((code for code in codes.values() if code != 0), 0))


def status(name: Name = None, json: Json = False) -> None:
    """Show the labs that are up, what each is like and what has passed.

    A lab whose owner is gone was left behind: remove it by `laconic lab down`.
    """
    from laconic_lab.network import Lab, labs, stale

    names, left_behind = labs() if name is None else [name], stale()
    shown: list[dict[str, Any]] = []
    for one in names:
        try:
            lab = Lab.attach(one)
            found = {"name": one, "owner": lab.owner, "stale": one in left_behind, "fault": None, "hosts": _hosts(lab)}
        except LaconicError as error:
            if name is not None:
                raise
            found = {"name": one, "owner": None, "stale": False, "fault": str(error), "hosts": []}
        shown.append(found)
        if not json:
            gone = ", which is gone" if found["stale"] else ""
            title = f"{one} (of process {found['owner']}{gone})" if found["owner"] else one
            if found["fault"] is None:
                _print_hosts(lab, title)
            else:
                stdout_console().print(f"{title}: broken: {found['fault']}", markup=False, soft_wrap=True)
    if json:
        print_json({"labs": shown})
    elif not shown:
        stdout_console().print("no lab is up", markup=False)


def down(
    name: Name = None,
    stale: Annotated[bool, typer.Option("--stale", help="All whose owner was killed, and no other.")] = False,
    json: Json = False,
) -> None:
    """Remove a lab: kill what runs on its hosts, and clear it away.

    Also one that was left by a process that was killed.
    """
    from laconic_lab import network

    if stale and name is not None:
        raise ConfigError("lab down wants either --name or --stale")
    names = network.stale() if stale else [_chosen(name)]
    for one in names:
        if not network.remove(one):
            raise ConfigError(f"there is no lab {one!r} (up: {', '.join(network.labs()) or 'none'})")
        if not json:
            stdout_console().print(f"{one} removed", markup=False)
    if json:
        print_json({"removed": names})
    elif not names:
        stdout_console().print("no lab was left behind", markup=False)


def _chosen(name: str | None) -> str:
    """The lab that is meant: if unnamed, the only one, or the one with the default name."""
    from laconic_lab.network import labs

    if name is not None:
        return name
    names = labs()
    if DEFAULT in names:
        return DEFAULT
    if len(names) == 1:
        return names[0]
    raise ConfigError(
        f"which lab? --name one of {', '.join(names)}" if names else "no lab is up: start one by `laconic lab up`"
    )


def _filled(lab: Lab, host: int, command: list[str]) -> list[str]:
    values = {"host": host, "rank": host - 1, "hosts": len(lab.hosts), "address": lab.address(host)}
    for key, value in values.items():
        command = [word.replace(f"{{{key}}}", str(value)) for word in command]
    return command


def _print_line(number: int, line: str) -> None:
    print(f"{number}: {line}", end="" if line.endswith("\n") else "\n", flush=True)


def _run_on(lab: Lab, hosts: list[int], command: list[str], tell: Callable[[int, str], None]) -> dict[int, int]:
    """Start it on all of them, tell their lines, and wait for all; exit codes by host."""

    def forward(number: int, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            tell(number, line)

    processes: list[subprocess.Popen[str]] = []
    threads: list[threading.Thread] = []
    try:
        for number in hosts:
            argv = _filled(lab, number, command)
            process = lab.popen(number, argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            processes.append(process)
            threads.append(threading.Thread(target=forward, args=(number, process)))
            threads[-1].start()
        codes = {number: _code(process.wait()) for number, process in zip(hosts, processes, strict=True)}
        for thread in threads:  # to what they have still to tell
            thread.join()
        return codes
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for thread in threads:
            thread.join(timeout=5)
        for process in processes:
            if process.stdout is not None:
                process.stdout.close()


def _code(returned: int) -> int:
    """As shells say it: 128 and the signal's number, for a process that one ended."""
    return 128 - returned if returned < 0 else returned


def _hosts(lab: Lab) -> list[dict[str, Any]]:
    return [
        {
            "host": number,
            "address": lab.address(number),
            **asdict(host),
            **asdict(lab.counters(number)),
            "processes": len(lab.pids(number)),
        }
        for number, host in enumerate(lab.hosts, 1)
    ]


def _print_hosts(lab: Lab, title: str | None = None) -> None:
    from rich.table import Table

    table = Table(title=title or lab.name, title_justify="left")
    for column in ("host", "address", "rate", "delay", "loss", "received", "sent", "lost", "processes"):
        table.add_column(column, justify="left" if column == "address" else "right")
    for host in _hosts(lab):
        table.add_row(
            str(host["host"]),
            host["address"],
            host["rate"] or "unlimited",
            host["delay"],
            f"{host['loss']:g} %",
            show_bytes(host["rx_bytes"]),
            show_bytes(host["tx_bytes"]),
            f"{host['rx_lost']} packets",
            str(host["processes"]),
        )
    stdout_console().print(table, markup=False)


def _root(context: typer.Context) -> None:
    """A network on this machine: hosts with slow, late, lossy cables.

    For measurements at a known rate; see docs/lab.md. Needs root, except for
    faults, which breaks things in a small job and checks what it promises.
    """
    if context.invoked_subcommand is None:
        print(context.get_help())


def register(app: typer.Typer) -> None:
    group = typer.Typer(rich_markup_mode="rich")
    group.callback(invoke_without_command=True)(_root)
    group.command("up", epilog=examples(*UP))(up)
    group.command("run", epilog=examples(*RUN))(run)
    group.command("status", epilog=examples(*STATUS))(status)
    group.command("down", epilog=examples(*DOWN))(down)
    group.command("faults", epilog=examples(*lab_faults.EXAMPLES))(lab_faults.faults)
    app.add_typer(group, name="lab", epilog=examples(*EXAMPLES))
