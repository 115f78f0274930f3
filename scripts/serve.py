"""Serves a filter that ``kbf export format=onnx`` wrote, over HTTP: python scripts/serve.py step.onnx [port]

POST /step with {"obs": [0.3, 0.4]} (null: nothing was observed) answers with the estimate, its covariance and the next state.
Send the state back with the next observation ("state": ...); without one the filter starts. Needs onnxruntime and numpy alone.
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import onnxruntime

session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
about = json.loads(session.get_modelmeta().custom_metadata_map["kbf"])


def step(asked):
    given = dict(asked.get("state") or about["initial"], seen=[asked.get("obs") is not None])
    if "control" in (entry["name"] for entry in about["inputs"]):
        given["control"] = [asked["control"]]
    zeros = np.zeros(next(entry["shape"] for entry in about["inputs"] if entry["name"] == "obs"))
    given["obs"] = zeros if asked.get("obs") is None else [asked["obs"]]
    kinds = {entry["name"]: (entry["dtype"], entry["shape"]) for entry in about["inputs"]}
    inputs = {name: np.asarray(given[name], kinds[name][0]).reshape(kinds[name][1]) for name in kinds}
    told = dict(zip([entry["name"] for entry in about["outputs"]], session.run(None, inputs), strict=True))
    state = {name.replace("next_", "state_", 1): told.pop(name).tolist() for name in list(told) if name.startswith("next_")}
    return {"states": about["states"], **{name: value[0].tolist() for name, value in told.items()}, "state": state}


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        try:
            code, answer = 200, step(json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0)))))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            code, answer = 400, {"error": f"{type(error).__name__}: {error}"}
        body = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2]) if len(sys.argv) > 2 else 8000), Handler)
    print(f"http://127.0.0.1:{server.server_port}/step", flush=True)
    server.serve_forever()
