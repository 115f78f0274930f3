"""The server of ``kbf serve``: Uvicorn with a time limit for requests and a graceful shutdown.

At SIGTERM or Ctrl-C requests in flight are answered. For `SECONDS_OF_END` the server still accepts
requests and closes each connection after its response; then it ends.
"""

import asyncio
import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kbf.runtime.optional_dependencies import need
from kbf.serving.app import ASGI, Service

# Seconds from the signal to the end of accepting requests.
SECONDS_OF_END = 0.5
# Seconds that requests in flight then have.
MAX_SECONDS_OF_END = 30
# Seconds after which a connection without a request is closed.
SECONDS_OF_IDLE_CONNECTION = 75
# Simultaneous connections, at most; a request on a further one gets the status 503.
MAX_CONNECTIONS = 1000


def make_server(
    app: ASGI, service: Service, *, host: str, port: int, seconds: int, log: Any = None
) -> Any:
    """Return a Uvicorn server.

    Args:
        app: the application of ``service``.
        service: is marked as ending after a signal.
        host, port: of the address.
        seconds: in which a connection must send its first request, the headers of it.
        log: called with a line about the start and the end.

    Raises:
        MissingPackageError: Uvicorn is not installed.
    """
    uvicorn = need("uvicorn", "serve", "kbf serve")
    base = need("uvicorn.protocols.http.auto", "serve", "kbf serve").AutoHTTPProtocol

    class TimedProtocol(base):
        """A connection that is closed if its first request does not arrive in time."""

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.loop.call_later(seconds, self.close_if_silent)

        def close_if_silent(self) -> None:
            """Close the connection if no headers have arrived."""
            if self.cycle is None and not self.transport.is_closing():
                self.transport.close()

    class Server(uvicorn.Server):
        """Answers requests in flight at a signal, and returns."""

        async def shutdown(self, sockets: Any = None) -> None:
            service.ending = True
            await asyncio.sleep(SECONDS_OF_END)
            await super().shutdown(sockets)
            if log is not None:
                log(
                    f"ended: {service.metrics.steps} steps, {service.sessions.created} sessions "
                    "since the start; no request in flight"
                )

        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            loop = asyncio.get_running_loop()
            signals = (signal.SIGINT, signal.SIGTERM)
            for each in signals:
                loop.add_signal_handler(each, self.handle_exit, each, None)
            try:
                yield
            finally:
                for each in signals:
                    loop.remove_signal_handler(each)

        def address(self) -> tuple[str, int]:
            """The host and the port that it listens on."""
            return self.servers[0].sockets[0].getsockname()[:2]

        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            if self.started and log is not None:
                name, chosen = self.address()
                name = f"[{name}]" if ":" in name else name
                log(f"http://{name}:{chosen}/")

    for name in ("uvicorn.error", "uvicorn.access"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return Server(
        uvicorn.Config(
            app,
            host=host,
            port=port,
            http=TimedProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            limit_concurrency=MAX_CONNECTIONS,
            timeout_keep_alive=SECONDS_OF_IDLE_CONNECTION,
            timeout_graceful_shutdown=MAX_SECONDS_OF_END,
            h11_max_incomplete_event_size=2**14,
            proxy_headers=False,
        )
    )
