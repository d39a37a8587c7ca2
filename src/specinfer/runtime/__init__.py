"""One forward of one model over a flattened batch."""

from specinfer.runtime.batch import Batch, WorkItem
from specinfer.runtime.runner import ModelRunner, Runner, make_pool, make_torch_runner

__all__ = ["Batch", "ModelRunner", "Runner", "WorkItem", "make_pool", "make_torch_runner"]
