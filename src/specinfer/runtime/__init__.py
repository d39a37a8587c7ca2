"""One forward of one model over a flattened batch."""

from specinfer.runtime.batch import Batch, WorkItem
from specinfer.runtime.runner import ModelRunner, Runner

__all__ = ["Batch", "ModelRunner", "Runner", "WorkItem"]
