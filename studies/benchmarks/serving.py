"""``kbf serve`` with the shipped example, next to an empty endpoint of the same framework.

Both servers are processes of this machine, Starlette under Uvicorn. The load generator is this
file: each client keeps a connection, and sends its next request when it has read the response to
the one before. The clients of ``kbf serve`` have sessions of their own and send one observation a
request. The sides alternate.
"""

from __future__ import annotations

import asyncio
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from kbf.plots.charts import Figure, curves
from kbf.runtime.optional_dependencies import need
from studies.benchmarks.base import Claim, Row, Settings, Tell

SIZES: dict[str, dict[str, Any]] = {
    "full": {"clients": [1, 10, 50], "requests": 2000, "rounds": 5, "total": 100_000, "idle": 230},
    "smoke": {"clients": [1, 5], "requests": 60, "rounds": 1, "total": 400, "idle": 20},
}
SHARE = 1 / 3
"""Requests a second, as a share of those of the empty endpoint."""
MAX_GROWTH = 8.0
"""MiB by which the memory of the server may grow from a tenth of the requests to all of them."""
MAX_SECONDS_OF_HEALTH = 0.5
"""Seconds that ``/health`` may take while other connections are idle."""
EMPTY: Row = dict.fromkeys(
    (
        *("clients", "requests", "idle connections", "errors", "ratio"),
        *("kbf serve, requests a second", "empty endpoint, requests a second"),
        *("memory after a tenth, MiB", "memory, MiB", "seconds of /health"),
    ),
    "",
)
"""A row without any measurement: the columns of the table."""
STEP = json.dumps({"obs": {"x_0": 0.3, "x_1": 0.4}}).encode()


class Client:
    """A connection that stays open."""

    def __init__(self, port: int) -> None:
        self.port = port

    async def open(self) -> Client:
        """Connect."""
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        return self

    async def ask(self, path: str, body: bytes = b"", method: str = "POST") -> tuple[int, bytes]:
        """Send a request; returns status and body of the response."""
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self.writer.write(head.encode() + body)
        lines = (await self.reader.readuntil(b"\r\n\r\n")).lower().split(b"\r\n")
        [length] = [line[15:] for line in lines if line.startswith(b"content-length:")]
        return int(lines[0].split()[1]), await self.reader.readexactly(int(length))

    def close(self) -> None:
        """Hang up."""
        self.writer.close()


async def load(port: int, path: str | None, clients: int, requests: int) -> tuple[float, int]:
    """Return requests a second and the number of responses that are no success.

    Args:
        port: of the server.
        path: of all requests; None starts a session for each client and steps through it.
        clients: that send at the same time.
        requests: of all clients together.
    """
    lines = [await Client(port).open() for _ in range(clients)]
    paths, bad = [path] * clients, 0
    if path is None:
        started = [json.loads((await each.ask("/sessions"))[1])["session"] for each in lines]
        paths = [f"/sessions/{name}/steps" for name in started]

    async def work(client: Client, where: str) -> int:
        failed = 0
        for _ in range(requests // clients):
            failed += (await client.ask(where, STEP))[0] != 200
        return failed

    began = time.perf_counter()
    pairs = zip(lines, paths, strict=True)
    bad = sum(await asyncio.gather(*(work(each, str(where)) for each, where in pairs)))
    seconds = time.perf_counter() - began
    for each, where in zip(lines, paths, strict=True):
        if path is None:
            status, _ = await delete(port, str(where).removesuffix("/steps"))
            bad += status != 204
        each.close()
    return requests // clients * clients / seconds, bad


async def delete(port: int, path: str) -> tuple[int, bytes]:
    """Delete a session; the response has no body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"DELETE {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    return int(answer.split()[1]), b""


async def health(port: int, idle: int) -> float:
    """Return the seconds that ``/health`` takes while so many connections are idle."""
    waiting = [await Client(port).open() for _ in range(idle)]
    began = time.perf_counter()
    status, _ = await (client := await Client(port).open()).ask("/health", method="GET")
    seconds = time.perf_counter() - began
    for each in [*waiting, client]:
        each.close()
    return seconds if status == 200 else float("inf")


@contextmanager
def server(words: list[str]) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A server in a process of its own, and its port, which the first line of its output has."""
    with subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            yield process, int(line.rstrip().rstrip("/").rpartition(":")[2])
        finally:
            process.terminate()
            process.wait(60)


def memory(process: subprocess.Popen[str]) -> float:
    """Resident memory of a process in MiB; NaN where the system does not report it."""
    try:
        pages = int(Path(f"/proc/{process.pid}/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return float("nan")
    return pages * resource.getpagesize() / 2**20


def run(settings: Settings, tell: Tell) -> list[Row]:
    """Rows for each number of clients, one for many requests, and one for idle connections."""
    for package in ("starlette", "uvicorn"):
        need(package, "serve", "the benchmark serving")
    ours = ["-m", "kbf.cli", "serve", "checkpoint=example:rotation", "port=0"]
    rows: list[Row] = []
    with (
        server(ours) as (process, port),
        server(["-m", "studies.benchmarks.serving"]) as (_, empty),
    ):
        for clients in settings["clients"]:
            tell(f"{clients} clients")
            rates: dict[str, list[float]] = {"kbf": [], "empty": []}
            bad = 0
            for _ in range(settings["rounds"]):
                for name, where, path in (("kbf", port, None), ("empty", empty, "/empty")):
                    rate, failed = asyncio.run(load(where, path, clients, settings["requests"]))
                    rates[name].append(rate)
                    bad += failed
            ratios = [a / b for a, b in zip(rates["kbf"], rates["empty"], strict=True)]
            rows.append(
                EMPTY
                | {
                    "clients": clients,
                    "requests": settings["requests"],
                    "kbf serve, requests a second": median(rates["kbf"]),
                    "empty endpoint, requests a second": median(rates["empty"]),
                    "ratio": median(ratios),
                    "errors": bad,
                }
            )
        first = settings["total"] // 10
        tell(f"{first:,} requests")
        _, failed = asyncio.run(load(port, None, 10, first))
        before = memory(process)
        tell(f"{settings['total']:,} requests")
        _, more = asyncio.run(load(port, None, 10, settings["total"] - first))
        rows.append(
            EMPTY
            | {
                "requests": settings["total"],
                "errors": failed + more,
                "memory after a tenth, MiB": before,
                "memory, MiB": memory(process),
            }
        )
        seconds = asyncio.run(health(port, settings["idle"]))
        rows.append(EMPTY | {"idle connections": settings["idle"], "seconds of /health": seconds})
    return rows


def claims(rows: list[Row]) -> list[Claim]:
    """A third of the empty endpoint's rate, no error, flat memory, a quick ``/health``."""
    found = []
    for row in rows[:-2]:
        ours = row["kbf serve, requests a second"]
        empty = row["empty endpoint, requests a second"]
        found.append(
            Claim(
                f"{row['clients']} clients: a third of the empty endpoint's requests, no error",
                f"{ours:.0f} of {empty:.0f} a second, {row['ratio']:.2f}; {row['errors']} errors",
                row["ratio"] >= SHARE and row["errors"] == 0,
            )
        )
    many, idle = rows[-2:]
    grown = many["memory, MiB"] - many["memory after a tenth, MiB"]
    found.append(
        Claim(
            f"{many['requests']:,} requests: no error, memory flat",
            f"{many['errors']} errors, {grown:+.1f} MiB from a tenth to all of them",
            many["errors"] == 0 and grown < MAX_GROWTH,
        )
    )
    seconds = idle["seconds of /health"]
    found.append(
        Claim(
            f"{idle['idle connections']} idle connections do not delay /health",
            f"{1000 * seconds:.0f} ms",
            seconds < MAX_SECONDS_OF_HEALTH,
        )
    )
    return found


def draw(rows: list[Row]) -> Figure:
    """Requests a second by the number of clients."""
    sides = ("kbf serve", "empty endpoint")
    points = [
        {"clients": row["clients"], "value": row[f"{name}, requests a second"], "side": name}
        for row in rows[:-2]
        for name in sides
    ]
    return curves(points, x="clients", y="value", by="side")


def serve_empty() -> None:
    """Serve an endpoint that reads a request and returns an empty object."""
    uvicorn = need("uvicorn", "serve", "the benchmark serving")
    Starlette = need("starlette.applications", "serve", "the benchmark serving").Starlette
    Route = need("starlette.routing", "serve", "the benchmark serving").Route
    JSONResponse = need("starlette.responses", "serve", "the benchmark serving").JSONResponse

    async def empty(request: Any) -> Any:
        await request.body()
        return JSONResponse({})

    class Server(uvicorn.Server):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            print(f"http://127.0.0.1:{self.servers[0].sockets[0].getsockname()[1]}/", flush=True)

    app = Starlette(routes=[Route("/empty", empty, methods=["POST"])])
    Server(uvicorn.Config(app, port=0, log_level="error", access_log=False, ws="none")).run()


if __name__ == "__main__":
    serve_empty()
