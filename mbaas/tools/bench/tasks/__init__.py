"""The tasks of the benchmark: datasets and their pipelines. Each task is a module here."""

from __future__ import annotations

from mbaas.tools.bench.tasks.audio import Audio
from mbaas.tools.bench.tasks.base import Task
from mbaas.tools.bench.tasks.detection import Detection
from mbaas.tools.bench.tasks.images import Images

TASKS: dict[str, Task] = {task.name: task for task in (Images(), Detection(), Audio())}
"""All tasks by name; the first is the default."""
