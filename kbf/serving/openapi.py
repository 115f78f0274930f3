"""The OpenAPI document of ``kbf serve``, with the columns of the filter, and its page."""

import html
import json
from typing import Any

from kbf import __version__
from kbf.fitted.fitted_filter import FittedFilter

NUMBER = {"type": ["number", "null"]}
SESSION = {"name": "session", "in": "path", "required": True, "schema": {"type": "string"}}


def document(fitted: FittedFilter) -> dict[str, Any]:
    """Return the OpenAPI document of the server of a filter."""
    columns = fitted.columns
    sensors = {
        "type": ["object", "null"],
        "properties": dict.fromkeys(columns["observations"], NUMBER),
        "description": "numbers by sensor, null where missing; null: nothing was observed",
    }
    image = {
        "description": "an image as PNG in base64, or nested lists c h w; null: none was seen",
        "type": ["object", "array", "null"],
        "properties": {"png": {"type": "string", "contentEncoding": "base64"}},
    }
    step: dict[str, Any] = {
        "type": "object",
        "required": ["obs", *(["control"] if columns["controls"] else [])],
        "properties": {
            "obs": sensors if columns["observations"] else image,
            "dt": {"type": "number", "description": "seconds since the step before"},
            "time": {
                "type": ["number", "string"],
                "description": "of the step, in seconds or as a date, in place of dt",
            },
        },
        "additionalProperties": False,
    }
    if columns["controls"]:
        step["properties"]["control"] = {
            "type": "object",
            "required": columns["controls"],
            "properties": {name: {"type": "number"} for name in columns["controls"]},
        }
    estimate = {
        "type": "object",
        "properties": dict.fromkeys(("value", "std", "lower", "upper"), NUMBER),
    }
    estimates = {
        "type": "object",
        "properties": {
            "step": {"type": "integer"},
            "time": NUMBER,
            "estimates": {
                "type": "object",
                "properties": dict.fromkeys(columns["states"], estimate),
                "description": "by state; lower and upper are the ends of intervals of 95 %",
            },
            "rejected": {"type": "boolean", "description": "the observation is implausible"},
            "alarm": {
                "type": ["string", "null"],
                "enum": ["out_of_distribution", "innovation_outlier", "diverged", None],
            },
            "late": {
                "type": "boolean",
                "description": "time is before that of the last step: the reading is taken in at "
                "its time, or dropped after max_delay seconds",
            },
            "warnings": {"type": "array", "items": {"type": "string"}},
        },
    }
    start = {
        "type": "object",
        "properties": {
            "seed": {"type": "integer", "description": "of filters that draw random numbers"},
            "observations": {"type": "array", "items": {"type": "string"}},
            "units": {"type": "object", "additionalProperties": {"type": "string"}},
            "time_step": {"type": "number", "description": "seconds"},
        },
        "description": "observations, units and time_step are compared with the training",
        "additionalProperties": False,
    }
    schemas = {"Start": start, "Step": step, "Estimates": estimates}
    schemas["Error"] = {"type": "object", "properties": {"error": {"type": "string"}}}
    state = {"application/octet-stream": {}}
    found = {
        "openapi": "3.1.0",
        "info": {
            "title": f"kbf serve: {fitted.model_name}",
            "version": __version__,
            "description": "A filter that estimates "
            f"{', '.join(columns['states'])} from {', '.join(columns['observations']) or 'images'}",
        },
        "components": {"schemas": schemas},
        "paths": {
            "/sessions": {
                "post": operation("Start a session", "Start", "201", others=state),
                "get": operation("All sessions, the one used last first"),
            },
            "/sessions/{session}/steps": {
                "post": operation("Take in one observation", "Step", returns="Estimates")
            },
            "/sessions/{session}": {
                "get": operation("The columns of a session, and its last estimates"),
                "delete": operation("Delete a session", status="204"),
            },
            "/sessions/{session}/state": {
                "get": operation("The state; POST /sessions with it continues", kinds=state)
            },
            "/sessions/{session}/history": {"get": operation("The last steps, by column")},
            "/sessions/{session}/image": {
                "get": operation("The last image", kinds={"image/png": {}})
            },
            "/health": {"get": operation("Whether the server is up, and what it serves")},
            "/metrics": {"get": operation("Metrics for Prometheus", kinds={"text/plain": {}})},
            "/openapi.json": {"get": operation("This document")},
            "/docs": {"get": operation("This document as a page", kinds={"text/html": {}})},
            "/": {"get": operation("A page to watch a session", kinds={"text/html": {}})},
        },
    }
    for path, ways in found["paths"].items():
        if "{session}" in path:
            ways["parameters"] = [SESSION]
    return found


def operation(
    summary: str,
    takes: str | None = None,
    status: str = "200",
    *,
    returns: str | None = None,
    kinds: dict[str, Any] | None = None,
    others: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return one operation of the document.

    Args:
        summary: what it does.
        takes, returns: schemas of request and response. status: of success.
        kinds: content types of the response, in place of JSON.
        others: content types of the request in addition to JSON.
    """
    schema = {} if returns is None else {"schema": {"$ref": f"#/components/schemas/{returns}"}}
    error = {"schema": {"$ref": "#/components/schemas/Error"}}
    found: dict[str, Any] = {
        "summary": summary,
        "responses": {
            status: {"description": "success", "content": kinds or {"application/json": schema}},
            "default": {
                "description": "refused, with the reason",
                "content": {"application/json": error},
            },
        },
    }
    if status == "204":
        del found["responses"]["204"]["content"]
    if takes is not None:
        body = {"application/json": {"schema": {"$ref": f"#/components/schemas/{takes}"}}}
        found["requestBody"] = {"content": body | (others or {})}
    return found


def documentation_page(content: dict[str, Any]) -> str:
    """Return the document as HTML, without scripts: operations, schemas and an example."""
    rows = "".join(
        f"<tr><td><code>{way.upper()} {html.escape(path)}</code></td>"
        f"<td>{html.escape(entry['summary'])}</td></tr>"
        for path, ways in content["paths"].items()
        for way, entry in ways.items()
        if way != "parameters"
    )
    schemas = "".join(
        f"<h2>{name}</h2><pre>{html.escape(json.dumps(schema, indent=2))}</pre>"
        for name, schema in content["components"]["schemas"].items()
    )
    obs = content["components"]["schemas"]["Step"]["properties"]["obs"]["properties"]
    example = json.dumps({"obs": dict.fromkeys(obs, 0.5)})
    header = "-H 'Content-Type: application/json'"
    commands = (
        f"curl -X POST {header} -d '{{}}' http://localhost:8000/sessions\n"
        f"curl -X POST {header} -d '{example}' http://localhost:8000/sessions/SESSION/steps"
    )
    title = html.escape(content["info"]["title"])
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title>"
        "<style>body{font:16px sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
        "td{padding:.2em 1em .2em 0}pre{background:#f4f4f4;padding:1em;overflow:auto}</style>"
        f"<h1>{title}</h1><p>{html.escape(content['info']['description'])}. "
        "<a href=openapi.json>openapi.json</a> is this page for programs, "
        "<a href=.>the page of the running filters</a> draws them.</p>"
        f"<table>{rows}</table><h2>Example</h2><pre>{html.escape(commands)}</pre>{schemas}</html>"
    )
