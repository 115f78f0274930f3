"""``kbf serve``, over loopback alone: the numbers of the filter, limits, and nothing that a client
sends spoils the next response.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request

import numpy as np
import pytest

import kbf
from kbf.cli import main

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")
pytest.importorskip("bokeh")

from kbf.serving import steps
from kbf.serving.app import Service, application
from kbf.serving.openapi import document
from kbf.serving.sessions import Sessions
from studies.benchmarks.serving import Client, health

pytestmark = pytest.mark.slow  # a server in a process of its own

LARGEST, SECONDS = 20_000, 2
STEP = {"obs": {"x_0": 0.3, "x_1": 0.4}}


@contextlib.contextmanager
def serving(*words, checkpoint="example:rotation"):
    """A server in a process of its own: the process and its port."""
    command = [sys.executable, "-m", "kbf.cli", "serve", f"checkpoint={checkpoint}", "port=0"]
    with subprocess.Popen(
        [*command, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            assert address.startswith("http://127.0.0.1:"), process.stderr.read()
            yield process, int(address.rstrip("/").rpartition(":")[2])
        finally:
            process.kill()


@pytest.fixture(scope="module")
def port():
    with serving(f"largest_body={LARGEST}", f"seconds={SECONDS}", "sessions=40") as (_, port):
        yield port


def ask(port, method, path, body=None, **headers):
    """Status and content of a response; JSON is parsed."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    raw = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    kind = {"Content-Type": "application/json"} if raw is not None else {}
    connection.request(
        method, path, raw, kind | {k.replace("_", "-"): v for k, v in headers.items()}
    )
    response = connection.getresponse()
    content = response.read()
    connection.close()
    if response.getheader("Content-Type", "") == "application/json":
        content = json.loads(content)
    return response.status, content


@pytest.fixture
def session(port):
    status, found = ask(port, "POST", "/sessions", {})
    assert status == 201 and found["observations"] == ["x_0", "x_1"]
    yield found["session"]
    ask(port, "DELETE", f"/sessions/{found['session']}")


def test_estimates_by_name_are_the_filters(port, session):
    online = kbf.load("example:rotation").online()
    for obs in ({"x_0": 0.3, "x_1": 0.4}, None, {"x_0": 0.1, "x_1": -0.2}):
        status, found = ask(port, "POST", f"/sessions/{session}/steps", {"obs": obs})
        wanted = online.step(obs)
        assert status == 200
        for name, value in wanted.items():
            assert found["estimates"][name]["value"] == pytest.approx(value, abs=1e-6)
            assert found["estimates"][name]["lower"] == pytest.approx(
                wanted.interval()[name][0], abs=1e-6
            )
    status, about = ask(port, "GET", f"/sessions/{session}")
    assert status == 200 and about["steps"] == 3 and about["last"] == found
    assert session in [each["session"] for each in ask(port, "GET", "/sessions")[1]["sessions"]]


def test_a_session_is_saved_restored_and_deleted(port, session):
    ask(port, "POST", f"/sessions/{session}/steps", STEP)
    status, state = ask(port, "GET", f"/sessions/{session}/state")
    assert status == 200
    kind = {"Content_Type": "application/octet-stream"}
    status, other = ask(port, "POST", "/sessions", state, **kind)
    assert status == 201
    path = f"/sessions/{other['session']}"
    pair = [ask(port, "POST", f"{p}/steps", STEP)[1] for p in (f"/sessions/{session}", path)]
    assert pair[0]["estimates"] == pair[1]["estimates"]
    assert ask(port, "DELETE", path)[0] == 204
    for method, where in (("POST", f"{path}/steps"), ("GET", path), ("DELETE", path)):
        status, found = ask(port, method, where, STEP if method == "POST" else None)
        assert status == 404 and "no such session" in found["error"]
    for damaged in (b"", state[:-100], b"PK\x03\x04" + bytes(100)):
        status, found = ask(port, "POST", "/sessions", damaged, **kind)
        assert status == 422 and len(found["error"].splitlines()) == 1


BAD = {
    "no JSON": (b"{", 400, "no JSON"),
    "no text": (b"\xff\xfe", 400, "JSON"),
    "a list": ([0.3, 0.4], 400, "object"),
    "null": (b"null", 400, "object"),
    "NaN": (b'{"obs": {"x_0": NaN, "x_1": 1}}', 400, "NaN is no number"),
    "Infinity": (b'{"obs": {"x_0": -Infinity, "x_1": 1}}', 400, "Infinity is no number"),
    "a number too large": (b'{"obs": {"x_0": 1e999, "x_1": 1}}', 422, "finite"),
    "more digits than are read": (b'{"obs": [1' + b"0" * 5000 + b", 1]}", 400, "JSON"),
    "too deep": (b'{"obs": ' + b"[" * 9000 + b"]" * 9000 + b"}", 400, "JSON"),
    "an unknown sensor": ({"obs": {"x_9": 1}}, 422, "'x_9' is not among the observations"),
    "text": ({"obs": {"x_0": "1", "x_1": 2}}, 422, "finite numbers"),
    "no obs": ({}, 422, "no obs"),
    "an empty body": (b"", 422, "no obs"),
}


@pytest.mark.parametrize("body, status, message", BAD.values(), ids=BAD)
def test_a_bad_request_has_one_line_and_spoils_nothing(port, session, body, status, message):
    path = f"/sessions/{session}/steps"
    found, content = ask(port, "POST", path, body)
    assert found == status and message in content["error"]
    assert len(content["error"].splitlines()) == 1
    assert ask(port, "POST", path, STEP)[1]["step"] == 1


def test_hosts_methods_paths_and_kinds(port, session):
    path = f"/sessions/{session}/steps"
    for host in ("evil.example", "evil.example:8000", "localhost.evil.example", ""):
        status, found = ask(port, "POST", path, STEP, Host=host)
        assert status in (400, 403), host
        assert status == 400 or "hosts=[NAME]" in found["error"]
    for host in ("localhost", "LOCALHOST:9", "127.0.0.1:8000"):
        assert ask(port, "POST", path, STEP, Host=host)[0] == 200
    for origin in ("http://evil.example", "https://localhost.evil.example:8000", "null"):
        status, found = ask(port, "POST", path, STEP, Origin=origin)
        assert status == 403 and "a page of another host" in found["error"]
    assert ask(port, "POST", path, STEP, Origin=f"http://127.0.0.1:{port}")[0] == 200
    for kind in ("text/plain", "", "application/x-www-form-urlencoded"):
        assert ask(port, "POST", path, STEP, Content_Type=kind)[0] == 415
    assert ask(port, "GET", "/nowhere")[0] == 404
    status, found = ask(port, "GET", path)
    assert status == 405 and "/docs" in found["error"]


def test_limits_of_size_and_of_sessions(port, session):
    path = f"/sessions/{session}/steps"
    status, found = ask(port, "POST", path, b" " * (LARGEST + 1))
    assert status == 413 and f"{LARGEST} bytes" in found["error"]
    parts = [b" " * 1000] * (LARGEST // 1000 + 1)  # without a length: chunks
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    kind = {"Content-Type": "application/json"}
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        connection.request("POST", path, iter(parts), kind, encode_chunked=True)
        assert connection.getresponse().status in (411, 413)
    started = []
    while (answer := ask(port, "POST", "/sessions", {}))[0] == 201:
        started.append(answer[1]["session"])
    assert answer[0] == 429 and "40 sessions" in answer[1]["error"]
    for name in started:
        assert ask(port, "DELETE", f"/sessions/{name}")[0] == 204


def test_health_and_metrics_count(port, session):
    before = ask(port, "GET", "/health")[1]["steps"]
    for obs in (STEP["obs"], {"x_0": 1e30, "x_1": -1e30}):
        ask(port, "POST", f"/sessions/{session}/steps", {"obs": obs})
    status, found = ask(port, "GET", "/health")
    assert status == 200 and found["status"] == "ok" and found["steps"] == before + 2
    assert found["states"] == ["z_0", "z_1"]
    text = ask(port, "GET", "/metrics")[1].decode()
    assert re.search(rf"^kbf_step_seconds_count {found['steps']}\.0$", text, re.M)
    assert re.search(r'^kbf_alarms_total\{alarm="out_of_distribution"\} [1-9]', text, re.M)
    assert re.search(r"^kbf_rejected_observations_total [1-9]", text, re.M)
    assert re.search(r"^process_resident_memory_bytes ", text, re.M)


def test_the_openapi_document_has_all_routes_and_the_columns(port):
    status, found = ask(port, "GET", "/openapi.json")
    fitted = kbf.load("example:rotation")
    assert status == 200 and found == document(fitted)
    service = Service(
        fitted,
        Sessions(fitted, limit=1, expiry=1, settings={}),
        largest_body=1,
        seconds=1,
        threads=1,
    )
    routes = {(method.lower(), path) for method, path, _ in service.routes()}
    ways = {(way, path) for path, entry in found["paths"].items() for way in entry}
    assert ways - {("parameters", path) for path in found["paths"]} == routes
    assert list(found["components"]["schemas"]["Step"]["properties"]["obs"]["properties"]) == [
        "x_0",
        "x_1",
    ]
    page = ask(port, "GET", "/docs")[1].decode()
    assert "POST /sessions/{session}/steps" in page and "://" not in page.replace(
        "http://localhost:8000", ""
    )


def test_idle_and_slow_connections_delay_nobody_and_are_closed(port, session):
    assert asyncio.run(health(port, 230)) < 1
    slow = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
    for connection in slow:
        connection.sendall(
            b"POST /sessions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{"
        )
    silent = socket.create_connection(("127.0.0.1", port))
    dripping = socket.create_connection(("127.0.0.1", port))
    began = time.monotonic()
    assert ask(port, "POST", f"/sessions/{session}/steps", STEP)[0] == 200, "while the others wait"
    for connection in slow:
        connection.settimeout(60)
        assert b" 408 " in connection.recv(1000).split(b"\r\n")[0]
    while time.monotonic() - began < 60:
        try:
            dripping.sendall(b"P" if time.monotonic() - began < 1 else b"O")
        except OSError:
            break
        time.sleep(0.1)
    assert time.monotonic() - began < 60
    silent.settimeout(60)
    assert silent.recv(10) == b""


def test_many_clients_at_once_get_their_own_responses(tmp_path):
    """Of a filter in float64: one in float32 rounds a batch of steps otherwise than single ones."""
    generator = np.random.default_rng(0)
    states = np.cumsum(generator.normal(size=(100, 1)), 0)
    checkpoint = tmp_path / "linear.ckpt"
    fitted = kbf.fit(
        states=states,
        observations=states + generator.normal(size=(100, 2)),
        model="kalman",
        progress=False,
    )
    fitted.save(checkpoint)
    wrong: list[object] = []

    def client(x):
        online = kbf.load(checkpoint).online()
        name = ask(port, "POST", "/sessions", {})[1]["session"]
        for _ in range(20):
            obs = {"x1": x, "x2": 0.0}
            found = ask(port, "POST", f"/sessions/{name}/steps", {"obs": obs})[1]
            if abs(found["estimates"]["z1"]["value"] - online.step(obs)["z1"]) > 1e-6:
                wrong.append(found)
        ask(port, "DELETE", f"/sessions/{name}")

    with serving(checkpoint=checkpoint) as (_, port):
        threads = [threading.Thread(target=client, args=(x,)) for x in (0.1, 0.5, 0.9)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(600)
        assert not wrong and not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT])
def test_requests_in_flight_are_answered_and_the_end_is_logged(sign):
    """30 clients that have sent half of their body at the signal, and 5 that send on and on."""

    async def clients(process, port):
        lines = [await Client(port).open() for _ in range(30)]
        busy = [await Client(port).open() for _ in range(5)]
        body = json.dumps({}).encode()
        head = b"POST /sessions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        for each in lines:
            each.writer.write(head + b"Content-Length: %d\r\n\r\n" % len(body) + body[:1])
            await each.writer.drain()

        async def send_on(client):
            """Requests until the server closes the connection: whole responses, and how many."""
            count = 0
            while True:
                client.writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
                head = (await client.reader.readuntil(b"\r\n\r\n")).lower()
                [length] = re.findall(rb"content-length: (\d+)", head)
                assert json.loads(await client.reader.readexactly(int(length)))
                count += 1
                if b"connection: close" in head:
                    return count

        running = [asyncio.create_task(send_on(each)) for each in busy]
        await asyncio.sleep(0.5)
        process.send_signal(sign)
        await asyncio.sleep(1.0)
        statuses = []
        for each in lines:
            each.writer.write(body[1:])
            statuses.append(int((await each.reader.readuntil(b"\r\n\r\n")).split()[1]))
        return statuses, await asyncio.gather(*running)

    with serving() as (process, port):
        statuses, counts = asyncio.run(clients(process, port))
        assert statuses == [201] * 30 and min(counts) > 1
        assert process.wait(60) == 0
        assert process.stdout.read().startswith("ended: 0 steps, 30 sessions")
        assert process.stderr.read() == ""


def without_network(app, method, path, body=None):
    """Status and parsed content of the response of an ASGI application."""
    raw, sent = b"" if body is None else json.dumps(body).encode(), []
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
    }

    async def receive():
        return {"type": "http.request", "body": raw, "more_body": False}

    async def send(message):
        sent.append(message)

    with contextlib.suppress(ZeroDivisionError):  # Starlette raises a fault again, for the log
        asyncio.run(app(scope, receive, send))
    return sent[0]["status"], json.loads(b"".join(each.get("body", b"") for each in sent))


def test_a_fault_of_the_server_is_one_json_error(monkeypatch):
    """A step that raises what nobody expects: 500, and the server goes on."""
    fitted = kbf.load("example:rotation")
    sessions = Sessions(fitted, limit=2, expiry=60, settings={})
    service = Service(fitted, sessions, largest_body=1000, seconds=9, threads=1)
    app = application(service, {"localhost"})
    name = without_network(app, "POST", "/sessions", {})[1]["session"]
    monkeypatch.setattr(steps, "take_together", lambda *a, **k: 1 / 0)
    status, found = without_network(app, "POST", f"/sessions/{name}/steps", STEP)
    assert status == 500 and "fault of the server" in found["error"]
    assert without_network(app, "GET", "/health")[0] == 200


def test_slow_filters_step_in_threads(monkeypatch):
    """Equal responses, in the order of the requests."""
    from kbf.serving import app as module

    fitted = kbf.load("example:rotation")
    found = []
    for limit in (0.0, 100.0):
        monkeypatch.setattr(module, "MAX_SECONDS_IN_LOOP", limit)
        sessions = Sessions(fitted, limit=2, expiry=60, settings={})
        service = Service(fitted, sessions, largest_body=1000, seconds=9, threads=2)
        assert (service.threads is None) == (limit > 1)
        app = application(service, {"localhost"})
        name = without_network(app, "POST", "/sessions", {})[1]["session"]
        path = f"/sessions/{name}/steps"
        found.append([without_network(app, "POST", path, STEP)[1] for _ in range(5)])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "words, message",
    [
        (["checkpoint=none.ckpt"], "none.ckpt"),
        (["checkpoint=bad.ckpt"], "bad.ckpt"),
        (["checkpoint=bad.ckpt", "port=99999"], "port must be a whole number from 0 to 65535"),
        (["checkpoint=bad.ckpt", "hosts=a"], "hosts must be a list of names"),
        (["checkpoint=bad.ckpt", "seconds=0"], "seconds must be a whole number from 1"),
        (["checkpoint=bad.ckpt", "sessions=x"], "sessions must be a whole number from 1"),
        (["checkpoint=bad.ckpt", "max_delay=-1"], "max_delay must be a number of seconds"),
    ],
)
def test_bad_settings(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.ckpt").write_bytes(b"\x08\x09nothing")
    assert main(["serve", *words]) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1


def test_an_address_that_is_taken(port, capsys):
    assert main(["serve", "checkpoint=example:rotation", f"port={port}"]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1 and str(port) in error


def test_the_page_needs_no_network(port, session):
    """All scripts are part of the page."""
    page = urllib.request.urlopen(f"http://127.0.0.1:{port}/?session={session}").read().decode()
    assert f"sessions/{session}/history" in page
    assert not re.search(r"<(script|link)[^>]*(src|href)=", page)
