"""The tables that a person reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import grpc_calls, grpc_floods, resp
from benchmarks.figures import FLOORS, OURS, Bar, beside, by_algorithm, peers_of, ratio, summary
from benchmarks.service import Contender, share
from benchmarks.team import Row

WIDTH = 150  # what the widest table needs; a narrower terminal wraps it


class Report:
    def __init__(self) -> None:
        self.console = Console(width=max(Console().width, WIDTH))

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False)

    def _table(self, title: str, left: Sequence[str], right: Sequence[str]) -> Table:
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
        for name in left:
            table.add_column(name, no_wrap=True)
        for name in right:
            table.add_column(name, justify="right", no_wrap=True)
        return table

    def times(self, title: str, rows: Sequence[Row]) -> None:
        """Show every contender, algorithm by algorithm, fastest first."""
        ran = by_algorithm(rows)
        from_redis = any(row.samples[0].server for row in ran)
        processes = len({row.worker for row in rows}) > 1
        columns = ["us/check", "least", "most", "checks/s", "admitted"]
        if from_redis:
            columns += ["p50 us", "p99 us", "trips", "server us"]
        table = self._table(title, ["algorithm", "library", *(["process"] if processes else [])], columns)
        for row in ran:
            figures = summary(row)
            names = [row.algorithm, row.library, *([row.worker] if processes else [])]
            digits = 1 if from_redis else 3
            cells = [f"{figures[name]:.{digits}f}" for name in ("us", "us_min", "us_max")]
            cells += [f"{figures['checks_per_second']:,.0f}", f"{figures['admitted']:.1%}"]
            if from_redis:
                server = figures["server"]
                cells += [f"{figures['p50_us']:.1f}", f"{figures['p99_us']:.1f}"]
                cells += [f"{server['round_trips']:.3f}", f"{server['server_us']:.1f}"]
            style = "bold" if row.library.startswith(OURS) else "dim" if row.library in FLOORS else None
            table.add_row(*names, *cells, style=style)
        self.console.print(table)
        for row in rows:
            if row.error is not None:
                self.say(f"  {row.title} ({row.worker}) did not run: {row.error}")

    def ratios(self, title: str, rows: Sequence[Row], against: Mapping[str, Row] | None = None) -> None:
        """Show how many times as fast we are: as each peer at the same algorithm, then as the rows of *against*."""
        ours = [row for row in by_algorithm(rows) if row.library.startswith(OURS)]
        libraries = sorted({peer.library for row in ours for peer in peers_of(rows, row.algorithm)})
        others = dict(against or {})
        processes = len({row.worker for row in ours}) > 1
        table = self._table(title, ["headgate", *(["process"] if processes else [])], [*libraries, *others])
        for row in ours:
            peers = {peer.library: peer for peer in peers_of(rows, row.algorithm)}
            cells = [f"{ratio(row, peers[name]).value:.2f}" if name in peers else "-" for name in libraries]
            cells += [f"{ratio(row, beside(rows, row, peer)).value:.2f}" for peer in others.values()]
            name = row.algorithm + row.library.removeprefix(OURS)
            table.add_row(name, *([row.worker] if processes else []), *cells)
        self.console.print(table)

    def commands(self, rows: Sequence[Row]) -> None:
        """Show what Redis ran for one check, the commands inside a script included."""
        table = self._table("Redis commands a check (INFO commandstats)", ["algorithm", "library"], [])
        table.add_column("commands")
        for row in by_algorithm(rows):
            if row.library not in FLOORS:
                server = summary(row)["server"]
                calls = {name: count for name, count in server.items() if name not in ("round_trips", "server_us")}
                text = ", ".join(f"{name} {count:.2f}" for name, count in calls.items() if count >= 0.005)
                table.add_row(row.algorithm, row.library, text)
        self.console.print(table)

    def locks(self, title: str, found: dict[str, dict[str, dict[str, float]]]) -> None:
        table = self._table(title, ["lock", "library"], ["p50", "p99", "most", "times"])
        for what, by in found.items():
            for library, row in by.items():
                cells = [f"{row[name]:.2f}" for name in ("p50_ms", "p99_ms", "most_ms")]
                style = "bold" if library == OURS else None
                table.add_row(what, library, *cells, f"{row['times']:,.0f}", style=style)
        self.console.print(table)

    def sizes(self, live: Sequence[dict[str, Any]]) -> None:
        names = ("algorithm", "library", "worker")
        table = self._table(
            "Memory store, live keys", [*names[:2], "process"], ["keys", "bytes/key", "RSS MB", "peak MB"]
        )
        for figures in live:
            if "error" in figures:
                self.say(f"  {figures['library']} {figures['algorithm']} did not run: {figures['error']}")
                continue
            cells = [f"{figures['keys']:,}", f"{figures['bytes_per_key']:.0f}"]
            cells += [f"{figures[name] / 1e6:.0f}" for name in ("rss", "peak_rss")]
            table.add_row(*(figures[name] for name in names), *cells)
        self.console.print(table)

    def floods(self, floods: Sequence[dict[str, Any]]) -> None:
        columns = ["keys sent", "admitted", "held", "us/check", "RSS before MB", "after", "peak"]
        table = self._table("Memory store of default size, flood of distinct keys", ["quota", "process"], columns)
        for figures in floods:
            if "error" in figures:
                self.say(f"  the flood at {figures['algorithm']} did not run: {figures['error']}")
                continue
            cells = [f"{figures[name]:,}" for name in ("sent", "admitted", "held")]
            cells += [f"{figures['us_per_check']:.2f}"]
            cells += [f"{figures[name] / 1e6:.0f}" for name in ("rss_before", "rss_after", "peak_rss")]
            table.add_row(figures["quota"], figures["worker"], *cells)
        self.console.print(table)

    def service(self, contenders: Sequence[Contender], client: str) -> None:
        """Show requests a second and the slowest hundredth, beside a handler that does nothing."""
        columns = ["requests/s", "p99 ms", "of hello"]
        table = self._table(f"Service, one worker, asked by {client}", ["contender"], columns)
        for one in contenders:
            cells = [f"{one.per_second:,.0f}", f"{one.p99_ms:.2f}", f"{share(one, contenders[0]):.2f}"]
            table.add_row(one.name, *cells, style="bold" if one.name.startswith(OURS) else "dim")
        self.console.print(table)

    def resp(self, targets: Sequence[resp.Target]) -> None:
        """Show commands a second, beside a PING of Redis."""
        columns = ["commands/s", "of PING"]
        title = f"Redis protocol, one worker, {resp.CONNECTIONS} connections of redis-benchmark"
        table = self._table(title, ["contender"], columns)
        for one in targets:
            cells = [f"{median(one.runs):,.0f}", f"{resp.share(one, targets[0]):.2f}"]
            table.add_row(one.title, *cells, style="bold" if one.name.startswith(OURS) else "dim")
        self.console.print(table)

    def grpc(self, targets: Sequence[grpc_calls.GrpcTarget]) -> None:
        """Show calls a second, beside grpcio.aio."""
        title = f"gRPC, one worker, {grpc_calls.CONNECTIONS * grpc_calls.STREAMS} calls in flight, asked by h2load"
        table = self._table(title, ["contender"], ["calls/s", "least", "most", "times grpcio.aio", "CPU us/call"])
        for one in targets:
            cells = [f"{one.per_second:,.0f}", f"{min(one.runs):,.0f}", f"{max(one.runs):,.0f}"]
            cells += [f"{grpc_calls.beside(one, targets[0]):.2f}", f"{median(one.cpu_us):.1f}"]
            table.add_row(one.name, *cells, style="bold" if one.name.startswith(OURS) else "dim")
        self.console.print(table)

    def grpc_floods(self, results: Sequence[grpc_floods.FloodResult]) -> None:
        """Show what a polite client notices, and what became of each flood."""
        columns = ["p50 ms", "p99 ms", "most ms", "service's CPU, p99 ms", "calls", "connections closed", "MB sent"]
        title = f"gRPC, memory, a polite client beside {grpc_floods.CONNECTIONS} connections that flood the port"
        table = self._table(title, ["flood"], columns)
        for one in results:
            cells = [f"{median(one.p50_ms):.2f}", f"{median(one.p99_ms):.2f}", f"{one.most_ms:.1f}"]
            cells += [f"{median(one.cpu_p99_ms):.2f}", f"{one.calls:,}", f"{one.cut_off:,}", f"{one.sent / 1e6:,.0f}"]
            table.add_row(one.name, *cells, style="dim" if one.name.startswith("(") else None)
        self.console.print(table)

    def web(self, framework: str, contenders: Sequence[Contender], client: str) -> None:
        """Show requests a second with a limit, beside the same application without one."""
        columns = ["requests/s", "p99 ms", "of none"]
        table = self._table(f"{framework}, one worker, one limit in memory, asked by {client}", ["limiter"], columns)
        for one in contenders:
            cells = [f"{one.per_second:,.0f}", f"{one.p99_ms:.2f}", f"{share(one, contenders[0]):.3f}"]
            table.add_row(one.name, *cells, style="bold" if one.name.startswith(OURS) else "dim")
        self.console.print(table)

    def processes(self, title: str, found: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]) -> None:
        """Show decisions a second of all processes together; *found* by name and number of keys."""
        columns = [f"{what}, {keys}" for keys in ("one key", "1,000 keys") for what in ("checks/s", "least share")]
        table = self._table(title, ["store"], columns)
        for name, by_keys in found.items():
            cells: list[str] = []
            for rounds in by_keys.values():
                ran = [one for one in rounds if "error" not in one]
                forms = {"per_second": ",.0f", "least_share": ".2f"}
                cells += [format(median(one[k] for one in ran), form) if ran else "-" for k, form in forms.items()]
                for error in {one["error"] for one in rounds if "error" in one}:
                    self.say(f"  {name}: {error}")
            table.add_row(name, *cells, style="bold" if name.startswith(OURS) else None)
        self.console.print(table)

    def postgresql(self, title: str, found: Mapping[str, float]) -> None:
        """Show microseconds a check of each contender, and checks a second."""
        table = self._table(title, ["contender"], ["us", "checks/s"])
        for name, took in found.items():
            style = "bold" if name.startswith(OURS) else "dim"
            table.add_row(name, f"{took:.0f}", f"{1e6 / took:,.0f}", style=style)
        self.console.print(table)

    def remote(self, title: str, found: Mapping[str, Mapping[str, float]]) -> None:
        """Show the percentiles of each contender, and the ratios of the slowest hundredth to that of the first."""
        first = next(iter(found.values()))
        compared = [name for name in first if name.endswith("p99")] or list(first)
        table = self._table(title, ["contender"], [*first, *(f"times {name}" for name in compared)])
        for name, figures in found.items():
            cells = [f"{value:.0f}" for value in figures.values()]
            cells += [f"{figures[column] / first[column]:.2f}" for column in compared]
            table.add_row(name, *cells, style="bold" if "://" in name else None)
        self.console.print(table)

    def latency(self, title: str, found: Mapping[str, Mapping[str, Mapping[str, float]]]) -> None:
        """Show both percentiles of each contender at each delay; *found* by delay, then by contender."""
        table = self._table(title, ["contender"], [f"{delay} ms" for delay in found])
        for name in next(iter(found.values())):
            cells = [f"{by[name]['p50'] / 1000:.3f}  {by[name]['p99'] / 1000:.3f}" for by in found.values()]
            table.add_row(name, *cells, style="dim" if name.startswith(("(", "limits")) else "bold")
        self.console.print(table)

    def cluster(self, title: str, found: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> None:
        """Show what each load took of the servers; *found* by load, then by the number of nodes."""
        columns = [
            "checks/s",
            "servers' us/check",
            "script us",
            "checks/trip",
            "busiest node",
            "fullest node",
            "full at",
        ]
        table = self._table(title, ["load", "nodes"], columns)
        for load, by in found.items():
            for count, one in by.items():
                cells = [f"{one['per_second']:,.0f}", f"{one['server_us']:.1f}", f"{one['commands']:.2f}"]
                cells += [f"{one['checks_per_trip']:.1f}"]
                cells += [f"{one['busiest']:.1%}", f"{one['fullest']:.1%}", f"{one['full_at']:,.0f}"]
                table.add_row(load, count, *cells)
        self.console.print(table)

    def sizing(self, found: Mapping[str, Any]) -> None:
        """Show bytes a key everywhere, then logs by their length and by their kind."""
        servers: Mapping[str, Any] = found["servers"]
        for name, by in servers.items():
            columns = ["key and value", "MEMORY USAGE", "all in"]
            table = self._table(f"{name}: bytes a key after one call", ["rule"], columns)
            for rule, one in by["keys"].items():
                table.add_row(rule, *(f"{one[what]:.0f}" for what in ("content", "usage", "grown")))
            self.console.print(table)
        columns = ["allocated", "resident", "shared file"]
        table = self._table("In process: bytes a key after one call", ["rule"], columns)
        for rule, one in found["process"].items():
            table.add_row(
                rule, *(f"{one[what]:.0f}" for what in ("allocated", "grown")), f"{found['shared'][rule]:.0f}"
            )
        self.console.print(table)
        self.say(f"  hybrid, bytes a warm key: {found['hybrid']:.0f}")
        for name, by in servers.items():
            for rule, one in by["million"].items():
                self.say(f"  {name}, {one['keys']:,} keys of {rule}: {one['used'] / 1e6:.0f} MB")
        table = self._table("Sliding window log, bytes by its calls", ["calls"], [*servers, "in process, allocated"])
        for length, size in found["process logs"].items():
            table.add_row(length, *(f"{by['logs'][length]:,}" for by in servers.values()), f"{size:,.0f}")
        self.console.print(table)
        for name, by in servers.items():
            kinds = list(next(iter(by["log kinds"].values())))
            heads = [f"{kind} {what}" for kind in kinds for what in ("B", "yes us", "no us")]
            table = self._table(f"{name}: kinds of logs", ["calls"], heads)
            for length, rows in by["log kinds"].items():
                cells = [text for one in rows.values() for text in self._log(one)]
                table.add_row(length, *cells)
            self.console.print(table)

    @staticmethod
    def _log(one: Mapping[str, float]) -> list[str]:
        return [f"{one['bytes']:,.0f}", f"{one['admitted']:.1f}", f"{one['denied']:.1f}"]

    def seconds(self, seconds: Mapping[str, float]) -> None:
        """Say how long each part took."""
        took = ", ".join(f"{part} {value:.0f} s" for part, value in seconds.items())
        self.say(f"Took {sum(seconds.values()) / 60:.1f} minutes: {took}")

    def bars(self, bars: Sequence[Bar]) -> None:
        table = self._table("Bars", ["what"], ["need", "measured", ""])
        for bar in bars:
            table.add_row(
                bar.what, bar.need, bar.measured, "met" if bar.met else "MISSED", style=None if bar.met else "bold red"
            )
        self.console.print(table)
