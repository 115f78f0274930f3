"""Recordings of one's own, from files: ``data=own data.path=...``."""

from kbf.data.own.boundary import Boundary
from kbf.data.own.read import read_observations
from kbf.data.own.recordings import Observations
from kbf.data.own.source import OwnData, complete

__all__ = ["Boundary", "Observations", "OwnData", "complete", "read_observations"]
