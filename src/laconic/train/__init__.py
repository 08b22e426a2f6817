"""Training: models, data sets, tasks, data shards, and the server and worker processes of a run."""

from __future__ import annotations

from laconic.train.data import Images, Text, load, load_text
from laconic.train.data_shards import Shards
from laconic.train.examples import Batch
from laconic.train.models import MODELS, build_model
from laconic.train.task import DATA, Task, build_task

__all__ = [
    "DATA", "MODELS", "Batch", "Images", "Shards", "Task", "Text", "build_model", "build_task", "load", "load_text",
]  # fmt: skip
