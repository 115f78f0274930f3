"""The HTTP application of ``kbf serve``, in Starlette: sessions, health, metrics and pages.

Where a step is fast the event loop takes it, together with those of other sessions that have
arrived (`kbf.serving.steps`); the steps of a slow filter run in threads, so that other requests are
answered in the meantime.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kbf.fitted.fitted_filter import FittedFilter
from kbf.fitted.online import Inputs
from kbf.fitted.program import examples
from kbf.runtime.optional_dependencies import need
from kbf.serving.openapi import document, documentation_page
from kbf.serving.page import page
from kbf.serving.sessions import Session, Sessions
from kbf.serving.steps import Steps
from kbf.serving.values import Refused

# Seconds that a step in the event loop may take; slower ones run in a thread.
MAX_SECONDS_IN_LOOP = 0.005
# Steps by which the time of a step is measured before the server starts.
STEPS_OF_MEASUREMENT = 10

ASGI = Callable[..., Awaitable[None]]


class Service:
    """The handlers of requests, with their sessions and metrics."""

    def __init__(
        self,
        fitted: FittedFilter,
        sessions: Sessions,
        *,
        largest_body: int,
        seconds: int,
        threads: int,
    ) -> None:
        """Measure the time of a step.

        Args:
            fitted: the filter.
            sessions: of the server.
            largest_body: bytes of a request, at most.
            seconds: that the body of a request may take to arrive.
            threads: in which the steps of a slow filter run.
        """
        self.fitted, self.sessions = fitted, sessions
        self.largest_body, self.seconds = largest_body, seconds
        self.responses: Any = need("starlette.responses", "serve", "kbf serve")
        self.metrics: Metrics = Metrics(sessions)
        self.steps: Steps = Steps(fitted)
        self.began: float = time.monotonic()
        self.ending: bool = False
        slow = seconds_of_step(fitted) > MAX_SECONDS_IN_LOOP
        self.threads: ThreadPoolExecutor | None = ThreadPoolExecutor(threads) if slow else None

    def routes(self) -> list[tuple[str, str, Callable[[Any], Awaitable[Any]]]]:
        """Return method, path and handler of each kind of request."""
        return [
            ("POST", "/sessions", self.create),
            ("GET", "/sessions", self.list),
            ("POST", "/sessions/{session}/steps", self.step),
            ("GET", "/sessions/{session}", self.about),
            ("DELETE", "/sessions/{session}", self.delete),
            ("GET", "/sessions/{session}/state", self.state),
            ("GET", "/sessions/{session}/history", self.history),
            ("GET", "/sessions/{session}/image", self.image),
            ("GET", "/health", self.health),
            ("GET", "/metrics", self.measured),
            ("GET", "/openapi.json", self.openapi),
            ("GET", "/docs", self.docs),
            ("GET", "/", self.page),
        ]

    async def create(self, request: Any) -> Any:
        """Start a session, at the prior or from a saved state."""
        if kind_of(request) == "application/octet-stream":
            session = self.sessions.create(state=await self.body(request))
        else:
            session = self.sessions.create(await self.json(request))
        return self.answer(session.about() | {"expires_after": self.sessions.expiry}, 201)

    async def list(self, request: Any) -> Any:
        """Return all sessions, the one used last first."""
        return self.answer({"sessions": [each.about() for each in self.sessions.all()]})

    async def step(self, request: Any) -> Any:
        """Take in one observation."""
        session = self.session(request)
        asked, began = await self.json(request), time.perf_counter()
        if self.threads is None:
            found = await self.steps.take(session, asked)
        else:  # one step of a session at a time, in the order of arrival
            async with session.lock:
                loop = asyncio.get_running_loop()
                found = await loop.run_in_executor(self.threads, session.step, asked)
        self.sessions.touch(session)
        self.metrics.count(found, time.perf_counter() - began)
        return self.answer(found)

    async def about(self, request: Any) -> Any:
        """Return the columns of a session, and its last estimates."""
        session = self.session(request)
        return self.answer(session.about() | {"last": session.last})

    async def delete(self, request: Any) -> Any:
        """Delete a session."""
        self.sessions.delete(request.path_params["session"])
        return self.responses.Response(status_code=204)

    async def state(self, request: Any) -> Any:
        """Return the state of a session, from which another one can start."""
        saved = self.session(request).saved()
        return self.responses.Response(saved, media_type="application/octet-stream")

    async def history(self, request: Any) -> Any:
        """Return the last steps of a session by column."""
        return self.answer(self.session(request).columns())

    async def image(self, request: Any) -> Any:
        """Return the last image of a session."""
        return self.responses.Response(self.session(request).picture(), media_type="image/png")

    async def health(self, request: Any) -> Any:
        """Return whether the server is up, and what it serves."""
        return self.answer(
            {
                "status": "ending" if self.ending else "ok",
                "seconds": round(time.monotonic() - self.began, 1),
                "sessions": len(self.sessions),
                "steps": self.metrics.steps,
                "model": self.fitted.model_name,
                **self.fitted.columns,
            }
        )

    async def measured(self, request: Any) -> Any:
        """Return the metrics in the text format of Prometheus."""
        text, kind = self.metrics.text()
        return self.responses.Response(text, headers={"Content-Type": kind})

    async def openapi(self, request: Any) -> Any:
        """Return the OpenAPI document."""
        return self.answer(document(self.fitted))

    async def docs(self, request: Any) -> Any:
        """Return the OpenAPI document as a page."""
        return self.responses.HTMLResponse(documentation_page(document(self.fitted)))

    async def page(self, request: Any) -> Any:
        """Return the page on which a session is watched."""
        chosen = request.query_params.get("session")
        sessions = self.sessions.all()
        session = self.sessions.get(chosen) if chosen else next(iter(sessions), None)
        return self.responses.HTMLResponse(page(self.fitted, sessions, session))

    def session(self, request: Any) -> Session:
        """Return the session that a request names."""
        return self.sessions.get(request.path_params["session"])

    def answer(self, content: dict[str, Any], status: int = 200) -> Any:
        """Return a response of JSON."""
        return self.responses.JSONResponse(content, status)

    async def body(self, request: Any) -> bytes:
        """Return the body of a request.

        Raises:
            Refused: it is larger than ``largest_body``, or takes longer than ``seconds``.
        """
        size, parts = 0, []
        try:
            async with asyncio.timeout(self.seconds):
                async for part in request.stream():
                    size += len(part)
                    if size > self.largest_body:
                        raise Refused(413, f"a request has at most {self.largest_body} bytes")
                    parts.append(part)
        except TimeoutError:
            raise Refused(
                408, f"the request did not arrive within {self.seconds} seconds"
            ) from None
        return b"".join(parts)

    async def json(self, request: Any) -> dict[str, Any]:
        """Return the JSON object of a request; an empty one of an empty body.

        Raises:
            Refused: the body is no JSON object, or has NaN or infinite numbers.
        """
        body = await self.body(request)
        if body and kind_of(request) != "application/json":
            raise Refused(415, "the Content-Type must be application/json")
        try:
            value = json.loads(body or b"{}", parse_constant=no_number)
        except (ValueError, RecursionError) as error:
            raise Refused(400, f"this is no JSON: {error}") from error
        if not isinstance(value, dict):
            raise Refused(400, 'a request is an object, as {"obs": {"sensor": 0.3}}')
        return value

    async def refused(self, request: Any, error: Any) -> Any:
        """Return the response to a request that is refused, or of no known path or method."""
        status = error.status if isinstance(error, Refused) else error.status_code
        reasons = {
            404: "there is no such path: see /docs",
            405: "this path has another method: see /docs",
        }
        reason = str(error) if isinstance(error, Refused) else reasons.get(status, str(error))
        self.metrics.refused(status)
        response = self.answer({"error": reason}, status)
        if status in (408, 413):  # what is left of the body is not read
            response.headers["Connection"] = "close"
        return response

    async def failed(self, request: Any, error: Exception) -> Any:
        """Return the response to a request that has met a fault of the server, which is logged."""
        self.metrics.refused(500)
        return self.answer({"error": "a fault of the server: its log has the reason"}, 500)


class Metrics:
    """Counts of the server, of the library ``prometheus_client``."""

    def __init__(self, sessions: Sessions) -> None:
        """Register the counters."""
        library = self.library = need("prometheus_client", "serve", "kbf serve")
        self.registry = registry = library.CollectorRegistry()
        self.seconds = library.Histogram(
            "kbf_step_seconds",
            "Time of a step",
            registry=registry,
            buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 2),
        )
        self.rejections = library.Counter(
            "kbf_rejected_observations", "Observations that were rejected", registry=registry
        )
        self.alarms = library.Counter("kbf_alarms", "Alarms by kind", ["alarm"], registry=registry)
        self.refusals = library.Counter(
            "kbf_refused_requests", "Requests that were refused", ["status"], registry=registry
        )
        for name, text, value in (
            ("sessions", "Sessions", lambda: len(sessions)),
            ("sessions_created", "Sessions since the start", lambda: sessions.created),
            ("sessions_expired", "Sessions that expired", lambda: sessions.expired),
        ):
            library.Gauge(f"kbf_{name}", text, registry=registry).set_function(value)
        library.ProcessCollector(registry=registry)
        self.steps: int = 0

    def count(self, found: dict[str, Any], seconds: float) -> None:
        """Count a step, from its response."""
        self.steps += 1
        self.seconds.observe(seconds)
        if found["rejected"]:
            self.rejections.inc()
        if found["alarm"]:
            self.alarms.labels(found["alarm"]).inc()

    def refused(self, status: int) -> None:
        """Count a request that was refused."""
        self.refusals.labels(str(status)).inc()

    def text(self) -> tuple[bytes, str]:
        """Return the metrics, and their content type."""
        return self.library.generate_latest(self.registry), self.library.CONTENT_TYPE_LATEST


class Guard:
    """Refuses requests to and from other hosts, and large bodies, before they are read.

    A browser names the site whose page sends a request as its ``Origin``. With DNS rebinding, a
    page of another site sends requests that name the host of that site.
    """

    def __init__(self, application: ASGI, service: Service, hosts: set[str]) -> None:
        """``hosts``: names, without a port, that requests may ask for."""
        self.application, self.service = application, service
        self.hosts: set[str] = {name.lower() for name in hosts}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self.application(scope, receive, send)
            return
        headers = dict(scope["headers"])
        length = headers.get(b"content-length", b"0")
        reason = None
        origin = headers.get(b"origin", b"").decode("latin-1").rpartition("//")[2]
        if host_of(headers.get(b"host", b"").decode("latin-1")) not in self.hosts:
            reason = Refused(403, "unknown host: kbf serve hosts=[NAME] allows more host names")
        elif origin and host_of(origin) not in self.hosts:
            reason = Refused(403, "a page of another host: kbf serve hosts=[NAME] allows its name")
        elif not length.isdigit() or int(length) > self.service.largest_body:
            most = self.service.largest_body
            reason = Refused(413, f"a request has at most {most} bytes")

        async def ending(message: Any) -> None:
            if self.service.ending and message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"connection", b"close")]
            await send(message)

        if reason is None:
            await self.application(scope, receive, ending)
        else:
            response = await self.service.refused(None, reason)
            await response(scope, receive, ending)


def application(service: Service, hosts: set[str]) -> ASGI:
    """Return the ASGI application of a service, for requests to some host names."""
    starlette = need("starlette.applications", "serve", "kbf serve")
    Route = need("starlette.routing", "serve", "kbf serve").Route
    HTTPException = need("starlette.exceptions", "serve", "kbf serve").HTTPException
    inner = starlette.Starlette(
        routes=[Route(path, handler, methods=[way]) for way, path, handler in service.routes()],
        exception_handlers={
            Refused: service.refused,
            HTTPException: service.refused,
            Exception: service.failed,
        },
    )
    return Guard(inner, service, hosts)


def seconds_of_step(fitted: FittedFilter) -> float:
    """Return the time of a step with an observation, the fastest of some."""
    online, seconds = fitted.online(), []
    obs, controls = examples(fitted.trained, STEPS_OF_MEASUREMENT)
    for k in range(len(obs)):
        control = None if controls is None else controls[k : k + 1]
        began = time.perf_counter()
        online.take(Inputs(obs[k : k + 1], control, 1, None))
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def kind_of(request: Any) -> str:
    """Return the content type of a request, without its parameters."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def host_of(header: str) -> str:
    """Return the name in a Host header, without its port.

    >>> host_of("Localhost:8000"), host_of("[::1]:8000"), host_of("")
    ('localhost', '[::1]', '')
    """
    name, colon, port = header.strip().lower().rpartition(":")
    return name if colon and (port.isdigit() or not port) else header.strip().lower()


def no_number(name: str) -> None:
    """Raise a ValueError for NaN and Infinity, which JSON does not have."""
    raise ValueError(f"{name} is no number; null: nothing was observed")
