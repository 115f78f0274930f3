"""``kbf serve``: serves the step of a filter over HTTP, from an ONNX program of ``kbf export``.

The server keeps no state: the client sends the state of its filter with each observation and
receives the next state. Any number of filters can thus run, and requests are independent. Waitress
reads requests without a thread for each; complete requests are checked before the program runs.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from rich.console import Console

from kbf.runtime.optional_dependencies import need

# Nested brackets in a request, at most.
MAX_JSON_DEPTH = 8

# Bytes of a request's headers, at most.
MAX_HEADER_BYTES = 2**14

# Simultaneous connections, at most.
MAX_CONNECTIONS = 200

# Status codes of the responses.
STATUS = {
    200: "OK",
    400: "Bad Request",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    413: "Content Too Large",
    415: "Unsupported Media Type",
    422: "Unprocessable Content",
}


class Refused(ValueError):
    """A request that is refused, with its HTTP status and the reason."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


def run(config: dict[str, Any]) -> int:
    """Serve until Ctrl-C; returns the exit code.

    Raises:
        ValueError: the file is no such program, a package is not installed, or a setting is out of
            range.
        OSError: the address is taken.
    """
    for key, least, most in (
        ("port", 0, 65535),
        ("threads", 1, 256),
        ("largest_body", 1, 2**30),
        ("seconds", 1, 3600),
    ):
        if type(config[key]) is not int or not least <= config[key] <= most:
            raise ValueError(
                f"{key} must be a whole number from {least} to {most}, got {config[key]!r}"
            )
    if not isinstance(config["hosts"], list | tuple) or not all(
        isinstance(name, str) for name in config["hosts"]
    ):
        raise ValueError(f"hosts must be a list of names, got {config['hosts']!r}")
    need("waitress", "serve", "kbf serve")
    step = Step(config["program"])
    names = {"localhost", "127.0.0.1", "[::1]", str(config["host"]), *config["hosts"]}
    server = make_server(Application(step, names), config)
    console = Console(highlight=False, soft_wrap=True)
    host = f"[{config['host']}]" if ":" in str(config["host"]) else config["host"]
    console.print(f"http://{host}:{server.effective_port}/step")
    if str(config["host"]) in ("0.0.0.0", "::") and not config["hosts"]:
        console.print(
            "requests to another name than localhost are refused: hosts=[NAME] allows more names"
        )
    try:
        server.run()  # its own handling of Ctrl-C ends it
    finally:
        server.close()
    return 0


def make_server(application: Application, config: dict[str, Any]) -> Any:
    """Return a listening Waitress server with the limits of ``config``.

    Raises:
        ValueError: Waitress is not installed.
        OSError: the address is taken, or not one of this machine.
    """
    create_server = need("waitress", "serve", "kbf serve").create_server
    HTTPChannel = need("waitress.channel", "serve", "kbf serve").HTTPChannel
    logging.getLogger("waitress.queue").setLevel(logging.ERROR)
    longest = config["seconds"]

    class TimedChannel(HTTPChannel):
        """A connection that is closed if a request is incomplete after ``seconds``.

        Waitress alone closes connections that are idle, not those that send a byte at a time.
        """

        began = 0.0

        def received(self, data: bytes) -> bool:
            """Overrides `HTTPChannel.received`: closes the connection after the time limit."""
            now = time.monotonic()
            if self.request is None:
                self.began = now
            elif now - self.began > longest:
                self.will_close = True
                return False
            return super().received(data)

    server = create_server(
        application,
        host=str(config["host"]),
        port=config["port"],
        threads=config["threads"],
        max_request_body_size=config["largest_body"],
        max_request_header_size=MAX_HEADER_BYTES,
        connection_limit=MAX_CONNECTIONS,
        channel_timeout=longest,
        cleanup_interval=1,
        ident="kbf",
        clear_untrusted_proxy_headers=True,
    )
    server.channel_class = TimedChannel
    return server


class Step:
    """The step that an exported program computes, with all inputs and outputs checked."""

    def __init__(self, path: str | Path) -> None:
        """Load a program and run its first step.

        Raises:
            ValueError: not a program of ``kbf export format=onnx``, or ONNX Runtime is not
                installed.
            FileNotFoundError: there is no such file.
        """
        onnxruntime = need("onnxruntime", "serve", "kbf serve")
        if not Path(path).is_file():
            raise FileNotFoundError(f"program: there is no file {path}")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = 1, 4
        try:
            self.session: Any = onnxruntime.InferenceSession(
                str(path), options, providers=["CPUExecutionProvider"]
            )
            self.about: dict[str, Any] = json.loads(
                self.session.get_modelmeta().custom_metadata_map["kbf"]
            )
            self.inputs: dict[str, tuple[np.dtype[Any], tuple[Any, ...]]] = {
                entry["name"]: (np.dtype(entry["dtype"]), tuple(entry["shape"]))
                for entry in self.about["inputs"]
            }
            self.outputs: list[str] = [entry["name"] for entry in self.about["outputs"]]
            request: dict[str, Any] = {"obs": None}
            if "control" in self.inputs:
                request["control"] = np.zeros(self.inputs["control"][1][1:]).tolist()
            self(request)
        except Exception as error:  # ONNX Runtime's own types, and entries that are missing
            reason = " ".join(str(error).split())[:200]
            raise ValueError(
                f"{path} is no program of kbf export format=onnx, or damaged: {reason}"
            ) from error

    def __call__(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the response to a request with ``obs``, ``state`` and perhaps ``control``.

        Raises:
            Refused: an entry is missing, unknown, not finite or of another shape; or the result of
                the step is not finite.
        """
        known = {"obs", "state", "control"} & {*self.inputs, "state"}
        if unknown := sorted(request.keys() - known):
            raise Refused(
                400, f"there is no {unknown[0]!r} in a request; it has {', '.join(sorted(known))}"
            )
        if missing := sorted(known - {"state"} - request.keys()):
            raise Refused(
                400, f"the request has no {missing[0]!r}; an obs may be null: nothing was observed"
            )
        state = request.get("state")
        state = self.about["initial"] if state is None else state
        leaves = {name for name in self.inputs if name.startswith("state_")}
        if not isinstance(state, dict) or state.keys() != leaves:
            raise Refused(
                400,
                f"state must be the one of the answer before, with {', '.join(sorted(leaves))}; "
                "or null to start",
            )
        obs = request["obs"]
        given = {name: self.array(name, state[name]) for name in leaves}
        given["seen"] = np.full(self.inputs["seen"][1], obs is not None)
        dtype, shape = self.inputs["obs"]
        given["obs"] = np.zeros(shape, dtype) if obs is None else self.array("obs", obs)
        if "control" in self.inputs:
            given["control"] = self.array("control", request["control"])
        values = self.session.run(None, {name: given[name] for name in self.inputs})
        results: dict[str, Any] = dict(zip(self.outputs, values, strict=True))
        if not all(np.isfinite(value).all() for value in results.values()):
            raise Refused(
                422,
                "the step has no finite result: this observation is not used; "
                "keep the state that you have",
            )
        after = {
            f"state_{name.removeprefix('next_')}": results.pop(name).tolist()
            for name in self.outputs
            if name[:5] == "next_"
        }
        return {
            "states": self.about["states"],
            **{name: value[0].tolist() for name, value in results.items()},
            "state": after,
        }

    def array(self, name: str, value: Any) -> np.ndarray:
        """Return a value of a request as an input of the program.

        ``obs`` and ``control`` have no batch dimension in the request.

        Raises:
            Refused: the value is not finite numbers in the shape of the input.
        """
        dtype, shape = self.inputs[name]
        wanted = shape if name.startswith("state_") else shape[1:]
        try:
            array = np.asarray(value)
            if array.dtype.kind not in ("b" if dtype.kind == "b" else "iuf"):
                raise ValueError
            with np.errstate(over="ignore"):
                array = array.astype(dtype)
        except (ValueError, TypeError, OverflowError):
            raise Refused(400, f"{name} must be numbers in the shape {list(wanted)}") from None
        if array.shape != wanted:
            raise Refused(
                400, f"{name} must be numbers in the shape {list(wanted)}, got {list(array.shape)}"
            )
        if not np.isfinite(array).all():
            raise Refused(
                400,
                f"{name} must be finite"
                + (" (null: nothing was observed)" if name == "obs" else ""),
            )
        return array.reshape(shape)


class Application:
    """The WSGI application: answers and counts requests."""

    def __init__(self, step: Step, hosts: set[str]) -> None:
        """Set the step and the host names, without a port, that are accepted in requests."""
        self.step: Step = step
        self.hosts: set[str] = {name.lower() for name in hosts}
        self.lock: Any = Lock()
        self.began: float = time.monotonic()
        self.counts: dict[str, int] = {"steps": 0, "rejected": 0, "refused": 0}

    def __call__(
        self, environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        """Answer one request with JSON."""
        try:
            status, answer = 200, self.answer(environ)
        except Refused as error:
            status, answer = error.status, {"error": str(error)}
            self.count("refused")
        body = json.dumps(answer, allow_nan=False).encode()
        headers = [
            ("Content-Type", "application/json"),
            ("Content-Length", str(len(body))),
            ("X-Content-Type-Options", "nosniff"),
        ]
        start_response(f"{status} {STATUS[status]}", headers)
        return [body]

    def answer(self, environ: dict[str, Any]) -> dict[str, Any]:
        """Return the response to a request for a step or for the health page.

        Raises:
            Refused: any other request.
        """
        if host_of(environ.get("HTTP_HOST", "")) not in self.hosts:
            raise Refused(
                403,
                "unknown host: kbf serve hosts=[NAME] allows more host names",
            )
        path, method = environ["PATH_INFO"], environ["REQUEST_METHOD"]
        wanted = {"/health": "GET", "/step": "POST"}.get(path)
        if method != wanted:
            raise Refused(405 if wanted else 404, "there are POST /step and GET /health")
        if path == "/health":
            keys = ("model", "data", "states", "observations", "controls")
            return {
                "status": "ok",
                "seconds": round(time.monotonic() - self.began, 1),
                **self.counts,
                **{key: self.step.about.get(key) for key in keys},
            }
        if environ.get("CONTENT_TYPE", "").partition(";")[0].strip().lower() != "application/json":
            raise Refused(415, "the Content-Type must be application/json")
        found = self.step(parsed(environ["wsgi.input"].read()))
        self.count("steps")
        if found.get("rejected"):
            self.count("rejected")
        return found

    def count(self, what: str) -> None:
        """Increment a counter."""
        with self.lock:
            self.counts[what] += 1


def host_of(header: str) -> str:
    """Return the name in a Host header, without its port.

    >>> host_of("Localhost:8000"), host_of("[::1]:8000"), host_of("")
    ('localhost', '[::1]', '')
    """
    name, colon, port = header.strip().lower().rpartition(":")
    return name if colon and (port.isdigit() or not port) else header.strip().lower()


def parsed(body: bytes) -> dict[str, Any]:
    """Return the JSON object of a request.

    Raises:
        Refused: the body is no JSON object, has NaN or infinite numbers, or is nested too deeply.
    """
    depth = 0
    for byte in body:
        depth += (byte in b"[{") - (byte in b"]}")
        if depth > MAX_JSON_DEPTH:
            raise Refused(400, f"brackets are nested more than {MAX_JSON_DEPTH} deep")
    try:
        value = json.loads(body, parse_constant=no_number)
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"this is no JSON of numbers: {error}") from error
    if not isinstance(value, dict):
        raise Refused(400, 'a request is an object: {"obs": [...], "state": {...}}')
    return value


def no_number(name: str) -> None:
    """Raise a ValueError for NaN and Infinity, which JSON does not have."""
    raise ValueError(f"{name} is no number; null: nothing was observed")
