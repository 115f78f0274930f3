"""``kbf serve``: serves a trained filter over HTTP, with sessions and a page to watch them.

The parts are in `kbf.serving`: sessions, application, server and page.
"""

import gc
import socket
import warnings
from typing import Any

from rich.console import Console

from kbf.fitted.checkpoint import load_filter
from kbf.fitted.fitted_filter import FittedFilter
from kbf.runtime.errors import DataWarning
from kbf.runtime.optional_dependencies import need

# Settings that are whole numbers, with their least and largest values.
COUNTS = (
    ("port", 0, 65535),
    ("threads", 1, 256),
    ("sessions", 1, 1_000_000),
    ("expiry", 1, 10**9),
    ("largest_body", 1, 2**30),
    ("seconds", 1, 3600),
)


def run(config: dict[str, Any]) -> int:
    """Serve until SIGTERM or Ctrl-C; returns the exit code.

    Raises:
        CheckpointError: the checkpoint cannot be loaded.
        ValueError: a package is not installed, or a setting is out of range.
        OSError: the address is taken.
    """
    for key, least, most in COUNTS:
        if type(config[key]) is not int or not least <= config[key] <= most:
            raise ValueError(
                f"{key} must be a whole number from {least} to {most}, got {config[key]!r}"
            )
    if not isinstance(config["hosts"], list | tuple) or not all(
        isinstance(name, str) for name in config["hosts"]
    ):
        raise ValueError(f"hosts must be a list of names, got {config['hosts']!r}")
    delay = config["max_delay"]
    if type(delay) not in (int, float) or not 0 <= delay < float("inf"):
        raise ValueError(f"max_delay must be a number of seconds, at least 0, got {delay!r}")
    for package in ("starlette", "uvicorn", "prometheus_client", "bokeh"):
        need(package, "serve", "kbf serve")
    from kbf.serving.app import Service, application
    from kbf.serving.server import make_server
    from kbf.serving.sessions import Sessions

    # Responses contain them.
    warnings.filterwarnings("ignore", category=DataWarning)
    fitted = FittedFilter(load_filter(config["checkpoint"], trust=config["trust"]))
    settings = {"max_delay": float(delay), "compile": config["compile"]}
    sessions = Sessions(
        fitted, limit=config["sessions"], expiry=config["expiry"], settings=settings
    )
    service = Service(
        fitted,
        sessions,
        largest_body=config["largest_body"],
        seconds=config["seconds"],
        threads=config["threads"],
    )
    host = str(config["host"])
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    socket.create_server((host, config["port"]), family=family).close()  # or it is taken
    names = {"localhost", "127.0.0.1", "[::1]", host, *config["hosts"]}
    console = Console(highlight=False, soft_wrap=True)
    if host in ("0.0.0.0", "::") and not config["hosts"]:
        console.print(
            "requests to another name than localhost are refused: hosts=[NAME] allows more names"
        )
    server = make_server(
        application(service, names),
        service,
        host=host,
        port=config["port"],
        seconds=config["seconds"],
        log=console.print,
    )
    gc.collect()
    gc.freeze()  # what is loaded stays: it is excluded from garbage collection
    server.run()
    return 0
