"""``laconic lab up``, ``run``, ``status``, ``down``, ``faults`` and ``replicas``."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from laconic.cli.options import Json, add_group, option
from laconic.cli.output import print_json, print_stderr, print_table, progress_bar, stdout_console
from laconic.errors import ConfigError, LaconicError
from laconic.tables import Table
from laconic.units import show_bytes
from laconic_lab.cli import lab_faults, lab_replicas

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
EXAMPLES = UP + RUN + STATUS + DOWN + lab_faults.EXAMPLES + lab_replicas.EXAMPLES

DEFAULT = "lab"

Name = Annotated[str | None, typer.Option(metavar="NAME", help="Which lab.", show_default="the one that is up")]


def up(
    hosts: Annotated[int, option("How many hosts.", metavar="N")] = 2,
    rate: Annotated[
        str | None, option("Rate of each host's link in each direction: 100mbit, 1gbit.", "unlimited")
    ] = None,
    delay: Annotated[
        str, option("Added on each link in each direction; the round trip of two hosts with 5ms takes 20 ms.")
    ] = "0",
    loss: Annotated[float, option("Percent of incoming packets that each host drops.")] = 0.0,
    jitter: Annotated[str, option("Upper bound of a random extra delay per packet.")] = "0",
    corrupt: Annotated[float, option("Percent of packets with one flipped bit that TCP does not notice.")] = 0.0,
    congestion: Annotated[str | None, option("TCP congestion control of all hosts.", "the machine's")] = None,
    name: Annotated[str, option("Name of the lab; several may exist.", metavar="NAME")] = DEFAULT,
    measure: Annotated[
        bool,
        typer.Option("--measure/--no-measure", help="Measure each link in both directions, about a second per host."),
    ] = True,
    json: Json = False,
) -> None:
    """Build hosts on one switch from network namespaces on this machine.

    They stay until `laconic lab down`. Needs root and the programs ip and tc
    (and nft for loss). A link is valid if its goodput is within 6 % of 0.956
    of its rate; the rest is headers.
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
                for a in range(1, hosts + 1):  # in a ring: each link once in each direction
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
            "laconic: not every link reaches its rate: the machine may be busy, or loss and delay slow TCP down"
        )


def run(
    command: Annotated[list[str], typer.Argument(metavar="-- CMD...", help="What to run.")],
    host: Annotated[int | None, option("The host, from 1.", metavar="I")] = None,
    everywhere: Annotated[bool, typer.Option("--all", help="On every host at once.")] = False,
    name: Name = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object that contains the output.")] = False,
) -> None:
    """Run a command on a host, or on all.

    In the command {host} is replaced by the host's number, {rank} by the number
    minus one, {hosts} by the number of hosts and {address} by the address. The
    exit code is the command's; with --all the first that is not 0.
    """
    from laconic_lab.network import Lab

    if (host is None) != everywhere:
        raise ConfigError("lab run needs either --host I or --all")
    lab = Lab.attach(_chosen(name))
    if host is not None and not json:
        raise typer.Exit(_code(lab.run(host, _filled(lab, host, command)).returncode))
    hosts = list(range(1, len(lab.hosts) + 1)) if host is None else [host]
    output: dict[int, list[str]] = {number: [] for number in hosts}
    tell = (lambda number, line: output[number].append(line)) if json else _print_line
    codes = _run_on(lab, hosts, command, tell)
    if json:
        results = [
            {"host": number, "address": lab.address(number), "exit_code": code, "output": "".join(output[number])}
            for number, code in codes.items()
        ]
        print_json({"name": lab.name, "hosts": results})
    for number, code in codes.items():
        if code != 0:
            print_stderr(f"laconic: host {number}: exit code {code}")
    raise typer.Exit(next((code for code in codes.values() if code != 0), 0))


def status(name: Name = None, json: Json = False) -> None:
    """Show the existing labs with their settings and traffic.

    A lab whose owner is gone was left behind: remove it with `laconic lab down`.
    """
    from laconic_lab.network import Lab, labs, stale

    names, left_behind = labs() if name is None else [name], stale()
    shown: list[dict[str, Any]] = []
    for one in names:
        try:
            lab = Lab.attach(one)
            shown_lab = {
                "name": one,
                "owner": lab.owner,
                "stale": one in left_behind,
                "fault": None,
                "hosts": _hosts(lab),
            }
        except LaconicError as error:
            if name is not None:
                raise
            shown_lab = {"name": one, "owner": None, "stale": False, "fault": str(error), "hosts": []}
        shown.append(shown_lab)
        if not json:
            gone = ", which is gone" if shown_lab["stale"] else ""
            title = f"{one} (of process {shown_lab['owner']}{gone})" if shown_lab["owner"] else one
            if shown_lab["fault"] is None:
                _print_hosts(lab, title)
            else:
                stdout_console().print(f"{title}: broken: {shown_lab['fault']}", markup=False, soft_wrap=True)
    if json:
        print_json({"labs": shown})
    elif not shown:
        stdout_console().print("no lab is up", markup=False)


def down(
    name: Name = None,
    stale: Annotated[bool, typer.Option("--stale", help="Remove all labs whose owner was killed.")] = False,
    json: Json = False,
) -> None:
    """Kill the processes on a lab's hosts and remove the lab.

    Also removes a lab whose owner was killed.
    """
    from laconic_lab import network

    if stale and name is not None:
        raise ConfigError("lab down takes either --name or --stale")
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
    """Return the named lab, else the one with the default name, else the only one."""
    from laconic_lab.network import labs

    if name is not None:
        return name
    names = labs()
    if DEFAULT in names:
        return DEFAULT
    if len(names) == 1:
        return names[0]
    raise ConfigError(
        f"several labs exist: --name one of {', '.join(names)}"
        if names
        else "no lab exists: start one with `laconic lab up`"
    )


def _filled(lab: Lab, host: int, command: list[str]) -> list[str]:
    values = {"host": host, "rank": host - 1, "hosts": len(lab.hosts), "address": lab.address(host)}
    for key, value in values.items():
        command = [word.replace(f"{{{key}}}", str(value)) for word in command]
    return command


def _print_line(number: int, line: str) -> None:
    print(f"{number}: {line}", end="" if line.endswith("\n") else "\n", flush=True)


def _run_on(lab: Lab, hosts: list[int], command: list[str], tell: Callable[[int, str], None]) -> dict[int, int]:
    """Run the command on all hosts, pass on their lines, and return the exit codes by host."""

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
        for thread in threads:  # until all lines are passed on
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
    """Return the exit code as shells do: 128 plus the signal's number for a killed process."""
    return 128 - returned if returned < 0 else returned


def _hosts(lab: Lab) -> list[dict[str, Any]]:
    return [
        {
            "host": number, "address": lab.address(number), **asdict(host), **asdict(lab.counters(number)),
            "processes": len(lab.pids(number)),
        }
        for number, host in enumerate(lab.hosts, 1)
    ]  # fmt: skip


def _print_hosts(lab: Lab, title: str | None = None) -> None:
    columns = ("host", "address", "rate", "delay", "loss", "received", "sent", "lost", "processes")
    rows = [
        (
            str(host["host"]), host["address"], host["rate"] or "unlimited", host["delay"], f"{host['loss']:g} %",
            show_bytes(host["rx_bytes"]), show_bytes(host["tx_bytes"]), f"{host['rx_lost']} packets",
            str(host["processes"]),
        )
        for host in _hosts(lab)
    ]  # fmt: skip
    print_table(Table(columns, rows, text_columns=2, title=title or lab.name))


HELP = """Emulate slow, distant and lossy networks on this machine.

See docs/lab.md. Needs root, except for faults and replicas, which
run fault campaigns against a small job and against torchft.
"""


def register(app: typer.Typer) -> None:
    commands: dict[str, Any] = {
        "up": (up, UP), "run": (run, RUN), "status": (status, STATUS), "down": (down, DOWN),
        "faults": (lab_faults.faults, lab_faults.EXAMPLES),
        "replicas": (lab_replicas.replicas, lab_replicas.EXAMPLES),
    }  # fmt: skip
    add_group(app, "lab", HELP, commands)
