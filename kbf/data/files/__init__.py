"""Recordings from files: ``data=own data.path=...``."""

from kbf.data.files.column_schema import ColumnSchema
from kbf.data.files.dataset import FileData
from kbf.data.files.layout import Observations
from kbf.data.files.read import read_observations

__all__ = ["ColumnSchema", "FileData", "Observations", "read_observations"]
