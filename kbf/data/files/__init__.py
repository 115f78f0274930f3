"""Recordings of one's own, from files: ``data=own data.path=...``."""

from kbf.data.files.column_schema import Boundary
from kbf.data.files.dataset import OwnData, complete
from kbf.data.files.layout import Observations
from kbf.data.files.read import read_observations

__all__ = ["Boundary", "Observations", "OwnData", "complete", "read_observations"]
