"""``kbf serve``, over loopback alone: right answers, and nothing that a client sends spoils the
next answer.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import io
import json
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch

from kbf.cli import main
from kbf.fitted.checkpoint import load_filter

pytest.importorskip("onnxruntime")
pytest.importorskip("waitress")

from kbf.commands.serve import Application, Step, make_server

pytestmark = pytest.mark.slow  # the program: its export takes most of the time

CONFIG = {"host": "127.0.0.1", "port": 0, "threads": 2, "largest_body": 20_000, "seconds": 1}


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    path = tmp_path_factory.mktemp("serve") / "step.onnx"
    assert main(["export", "checkpoint=example:rotation", f"out={path}", "steps=3"]) == 0
    return path


@pytest.fixture(scope="module")
def step(program):
    return Step(program)


@pytest.fixture
def application(step):
    return Application(step, {"localhost", "127.0.0.1"})


@pytest.fixture
def port(application):
    server = make_server(application, CONFIG)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    yield server.effective_port
    server.close()
    server.task_dispatcher.shutdown()


def ask(
    application, body, path="/step", method="POST", host="localhost:8000", kind="application/json"
):
    """A request without a network: its status and answer."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    environ = {
        "HTTP_HOST": host,
        "PATH_INFO": path,
        "REQUEST_METHOD": method,
        "CONTENT_TYPE": kind,
        "wsgi.input": io.BytesIO(raw),
    }
    status: list[str] = []
    [answer] = application(environ, lambda line, headers: status.append(line))
    return int(status[0].split()[0]), json.loads(answer)


def over_http(port, body, path="/step", method="POST", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request(method, path, body, {"Content-Type": "application/json", **headers})
    answer = connection.getresponse()
    return answer.status, answer.read()


def test_answers_are_the_filters(application):
    """Two observations, one missing, against the filter."""
    filter = load_filter("example:rotation").filter
    state, answer = filter.init(1), {}
    for obs in ([0.3, 0.4], None, [0.1, -0.2]):
        status, answer = ask(
            application, {"obs": obs, **({"state": answer["state"]} if answer else {})}
        )
        assert status == 200
        state = filter.predict(state)
        state = (
            state
            if obs is None
            else filter.update(state, torch.tensor([obs], dtype=filter.estimate(state).dtype))
        )
        np.testing.assert_allclose(
            answer["estimate"], filter.estimate(state)[0], rtol=1e-4, atol=1e-5
        )


def test_an_impossible_observation_is_passed_over_and_counted(application):
    """The program of a Gaussian law finds 1e30 impossible: the state moves on as if nothing had
    been observed.
    """
    _, before = ask(application, {"obs": [0.3, 0.4]})
    _, wild = ask(application, {"obs": [1e30, -1e30], "state": before["state"]})
    _, none = ask(application, {"obs": None, "state": before["state"]})
    assert (before["rejected"], wild["rejected"], none["rejected"]) == (False, True, False)
    assert (wild["state"].pop("state_rejections"), none["state"].pop("state_rejections")) == (
        [1],
        [0],
    )
    assert wild["state"] == none["state"] and wild["estimate"] == none["estimate"]
    health = ask(application, b"", "/health", "GET")[1]
    assert (health["steps"], health["rejected"], health["refused"]) == (3, 1, 0)


GOOD = {"obs": [0.3, 0.4]}
BAD = {
    "nothing": (b"", 400, "no JSON of numbers"),
    "no JSON": (b"{", 400, "no JSON of numbers"),
    "no text": (b"\xff\xfe", 400, "JSON"),
    "a list": ([0.3, 0.4], 400, "object"),
    "null": (None, 400, "object"),
    "NaN": (b'{"obs": [NaN, 1]}', 400, "NaN is no number"),
    "Infinity": (b'{"obs": [-Infinity, 1]}', 400, "Infinity is no number"),
    "a number too large": (b'{"obs": [1e999, 1]}', 400, "finite"),
    "more digits than a float": (
        b'{"obs": [1' + b"0" * 400 + b", 1]}",
        400,
        "numbers in the shape",
    ),
    "more digits than are read": (b'{"obs": [1' + b"0" * 5000 + b", 1]}", 400, "JSON"),
    "too deep": (b'{"obs": ' + b"[" * 9000 + b"]" * 9000 + b"}", 400, "deep"),
    "wide": ({"obs": [1, 2, 3]}, 400, "shape [2]"),
    "narrow": ({"obs": 1}, 400, "shape [2]"),
    "ragged": ({"obs": [[1], 2]}, 400, "shape [2]"),
    "text": ({"obs": ["1", "2"]}, 400, "numbers"),
    "truth": ({"obs": [True, False]}, 400, "numbers"),
    "null inside": ({"obs": [None, 1]}, 400, "numbers"),
    "no observation": ({}, 400, "no 'obs'"),
    "something else": (GOOD | {"trust": True}, 400, "no 'trust'"),
    "a state that is none": (GOOD | {"state": 3}, 400, "state must be"),
    "an empty state": (GOOD | {"state": {}}, 400, "state must be"),
}


@pytest.mark.parametrize("body, status, message", BAD.values(), ids=BAD)
def test_bad_requests_get_one_line_and_spoil_nothing(application, body, status, message):
    before = ask(application, GOOD)
    found, answer = ask(application, body)
    assert found == status and message in answer["error"] and len(answer["error"].splitlines()) == 1
    assert ask(application, GOOD) == before
    assert application.counts == {"steps": 2, "rejected": 0, "refused": 1}


def test_a_spoiled_state_is_refused(application):
    _, answer = ask(application, GOOD)
    for name, leaf in answer["state"].items():
        values = np.asarray(leaf)
        for wrong in ((values * np.nan).tolist(), np.zeros((3, *values.shape)).tolist(), "x", None):
            body = json.dumps(GOOD | {"state": answer["state"] | {name: wrong}}).encode()
            assert ask(application, body)[0] == 400


def test_huge_observations_never_come_back_as_no_numbers(application):
    for size in (1e3, 1e19, 1e30, 1e38):
        status, answer = ask(application, {"obs": [size, -size]})
        assert status == 422 or np.isfinite(answer["estimate"]).all()


def test_only_known_hosts_methods_and_kinds(application):
    for host in (
        "evil.example",
        "evil.example:8000",
        "localhost.evil.example",
        "",
        "127.0.0.1.evil.example:80",
    ):
        assert ask(application, GOOD, host=host)[0] == 403
    for host in ("localhost", "LOCALHOST:9", "127.0.0.1:8000"):
        assert ask(application, GOOD, host=host)[0] == 200
    assert ask(application, GOOD, path="/")[0] == 404
    assert ask(application, GOOD, method="GET")[0] == 405
    for kind in (
        "text/plain",
        "",
        "application/x-www-form-urlencoded",
    ):  # what a page of others may send
        assert ask(application, GOOD, kind=kind)[0] == 415


def test_health(application):
    ask(application, GOOD)
    ask(application, {})
    status, answer = ask(application, b"", path="/health", method="GET")
    assert (
        status == 200
        and answer["status"] == "ok"
        and answer["steps"] == 1
        and answer["refused"] == 1
    )
    assert answer["states"] == ["z_0", "z_1"]


def gone(connection):
    """Send one more byte; whether the server has hung up."""
    try:
        connection.sendall(b" ")
    except OSError:
        return True
    return False


def test_limits_of_size_and_time_over_loopback(port):
    assert over_http(port, json.dumps(GOOD))[0] == 200
    assert over_http(port, None, **{"Content-Length": "30000"})[0] == 413
    with contextlib.suppress(
        ConnectionError
    ):  # refused before it is read to the end; to one still sending, by a reset
        assert over_http(port, json.dumps(GOOD), Other="x" * 40_000)[0] in (400, 431)
    assert over_http(port, json.dumps(GOOD), Host="evil.example")[0] == 403
    stalled = [
        socket.create_connection(("127.0.0.1", port)) for _ in range(20)
    ]  # ten times as many as threads
    for connection in stalled:
        connection.sendall(
            b"POST /step HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"
        )
    began = time.monotonic()
    assert over_http(port, json.dumps(GOOD))[0] == 200, "while the others wait"
    dripping = stalled.pop()
    while (
        not gone(dripping) and time.monotonic() - began < 60
    ):  # a second is allowed; a busy machine may be late
        time.sleep(0.1)
    assert gone(dripping)
    for connection in stalled:
        connection.settimeout(60)
        assert connection.recv(1000) == b""  # closed
    assert over_http(port, b"", path="/health", method="GET")[0] == 200


def test_many_clients_at_once_get_their_own_answers(port):
    expected = {x: over_http(port, json.dumps({"obs": [x, 0.0]})) for x in (0.1, 0.5, 0.9)}
    wrong: list[float] = []

    def client(x):
        wrong.extend(
            x for _ in range(20) if over_http(port, json.dumps({"obs": [x, 0.0]})) != expected[x]
        )

    threads = [threading.Thread(target=client, args=(x,)) for x in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert not wrong and not any(thread.is_alive() for thread in threads)


def test_the_command_says_where_it_listens_and_ends_with_the_signal(program):
    words = [sys.executable, "-m", "kbf.cli", "serve", f"program={program}", "port=0"]
    started = functools.partial(
        signal.signal, signal.SIGINT, signal.SIG_DFL
    )  # in the background it is ignored
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=started
    ) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            port = int(address.removeprefix("http://127.0.0.1:").removesuffix("/step"))
            assert over_http(port, json.dumps(GOOD))[0] == 200
            process.send_signal(signal.SIGINT)
            process.wait(60)
        finally:
            process.kill()


@pytest.mark.parametrize(
    "words, message",
    [
        (["program=none.onnx"], "there is no file none.onnx"),
        (["program=bad.onnx"], "is no program of kbf export"),
        (["program=bad.onnx", "port=99999"], "port must be a whole number from 0 to 65535"),
        (["program=bad.onnx", "hosts=a"], "hosts must be a list of names"),
        (["program=bad.onnx", "seconds=0"], "seconds must be a whole number from 1"),
    ],
)
def test_bad_settings(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.onnx").write_bytes(b"\x08\x09nothing")
    assert main(["serve", *words]) == 2
    told = capsys.readouterr().err
    assert message in told and len(told.splitlines()) == 1
