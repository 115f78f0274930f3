"""The page of ``kbf serve`` in headless Chromium: what a person sees of a running filter."""

from __future__ import annotations

import base64
import http.server
import io
import json
import math
import shutil
import subprocess
import threading
import urllib.request

import numpy as np
import pytest
from PIL import Image

import kbf

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")
pytest.importorskip("bokeh")

from kbf.serving.page import ALARM, ESTIMATE, REJECTED, page
from kbf.serving.sessions import Sessions
from studies.benchmarks.serving import server

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine"),
]


def post(port, path, body):
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    return json.load(urllib.request.urlopen(request, timeout=60))


def seen(port, query, tmp_path):
    """The page as a browser draws it after some seconds, ``h w c``."""
    path = tmp_path / "page.png"
    command = [
        *(str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu"),
        *("--window-size=1200,900", "--virtual-time-budget=8000", f"--screenshot={path}"),
        f"--user-data-dir={tmp_path / 'profile'}",
        f"http://127.0.0.1:{port}/{query}",
    ]
    subprocess.run(command, timeout=240, check=True, stderr=subprocess.DEVNULL)
    return np.asarray(Image.open(path).convert("RGB")).astype(int)


def count(pixels, colour, below=110):
    """Number of pixels of a colour, in the figures below the line that explains the colours."""
    rgb = [int(colour[k : k + 2], 16) for k in (1, 3, 5)]
    return int((np.abs(pixels[below:] - rgb).max(-1) < 12).sum())


def drive(port, session, outlier):
    """Sixty observations of a rotation, two of them impossible if ``outlier``."""
    for k in range(60):
        x = {"x_0": math.cos(k / 6), "x_1": math.sin(k / 6)}
        if outlier and k in (30, 45):
            x = {"x_0": 1e30, "x_1": -1e30}
        post(port, f"/sessions/{session}/steps", {"obs": x})


def test_a_person_sees_estimates_bands_places_rejections_and_alarms(tmp_path):
    with server(["-m", "kbf.cli", "serve", "checkpoint=example:rotation", "port=0"]) as (_, port):
        empty = seen(port, "", tmp_path)
        wild, calm = (post(port, "/sessions", {})["session"] for _ in range(2))
        drive(port, wild, outlier=True)
        drive(port, calm, outlier=False)
        found, ordinary = (seen(port, f"?session={each}", tmp_path) for each in (wild, calm))
        first = seen(port, "", tmp_path)  # the session used last
    for each in (found, ordinary, first):
        assert count(each, ESTIMATE) > 500
        assert count(each, "#c7ddec") > 5000  # the bands: a quarter of the colour on white
    assert count(found, REJECTED) > 20 and count(found, ALARM) > 100
    assert count(ordinary, REJECTED) == 0 and count(ordinary, ALARM) == 0
    assert count(empty, ESTIMATE) == 0 and (empty != 255).any()


def test_the_page_follows_a_running_filter(tmp_path):
    """A page from before the first step draws the steps that it requests."""
    fitted = kbf.load("example:rotation")
    sessions = Sessions(fitted, limit=1, expiry=100, settings={})
    session = sessions.create()
    text = page(fitted, [session], session).encode()
    for k in range(60):
        session.step({"obs": {"x_0": math.cos(k / 6), "x_1": math.sin(k / 6)}})

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            history = self.path.endswith("/history")
            self.send_response(200)
            self.send_header("Content-Type", "application/json" if history else "text/html")
            self.end_headers()
            self.wfile.write(json.dumps(session.columns()).encode() if history else text)

        def log_message(self, *words):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        found = seen(running.server_port, "", tmp_path)
        running.shutdown()
    assert count(found, ESTIMATE) > 500 and count(found, "#c7ddec") > 5000


def test_the_last_image_is_on_the_page(tmp_path):
    rng = np.random.default_rng(0)
    place = 7 + 4 * np.sin(np.cumsum(rng.normal(0, 0.3, (60, 2)), 0))
    y, x = np.mgrid[0:16, 0:16]
    squared = (y - place[:, :1, None]) ** 2 + (x - place[:, 1:, None]) ** 2
    images = (255 * np.exp(-squared / 4)).astype("uint8")
    config = {"data.encoding.epochs": 1, "data.encoding.members": 2}
    fitted = kbf.fit(states=place, images=images, model="kalman", config=config, progress=False)
    checkpoint = tmp_path / "spot.ckpt"
    fitted.save(checkpoint)
    online = fitted.online()
    words = ["-m", "kbf.cli", "serve", f"checkpoint={checkpoint}", "port=0"]
    with server(words) as (_, port):
        session = post(port, "/sessions", {})["session"]
        for image in images[:5]:
            file = io.BytesIO()
            Image.fromarray(image).save(file, "PNG")
            obs = {"png": base64.b64encode(file.getvalue()).decode()}
            found = post(port, f"/sessions/{session}/steps", {"obs": obs})
            wanted = online.step(image[None])
            for name, value in wanted.items():
                assert found["estimates"][name]["value"] == pytest.approx(value, rel=1e-5)
        pixels = seen(port, f"?session={session}", tmp_path)
    black = (pixels.max(-1) < 8).sum()
    assert black > 40_000  # the dark part of a picture of 320 x 320 pixels
