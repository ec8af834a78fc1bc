"""A program that a launcher starts once for each rank, with the fake worker.

For tests only; `python launched.py JSON`, with engine arguments, and beside them `version` (which this rank claims to
be) and `trouble`.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from tests.parallel.fake_worker import FakeWorker, Trouble, plan_of

import longfill
from longfill.config import EngineArgs
from longfill.engine.executors import make_executor
from longfill.errors import LongfillError
from longfill.models.config import ModelConfig
from longfill.models.hub import resolve_model


def main(words: dict[str, Any]) -> None:
    longfill.__version__ = words.pop("version", longfill.__version__)
    trouble = words.pop("trouble", None)
    folder = resolve_model("needle", None)
    try:
        executor = make_executor(EngineArgs(**words), folder, ModelConfig.from_folder(folder, None), FakeWorker)
        for _ in range(2):
            executor.execute(plan_of(), ())
        if trouble is not None:
            executor.execute(plan_of(Trouble(*trouble)), ())
    except LongfillError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        sys.exit(2)
    print(f"{executor.worker.mesh.world.size} ranks, {executor.worker.num_threads} threads", flush=True)
    executor.close()


def run(environment: dict[str, str], words: dict[str, Any], output: str) -> None:
    """In a process that was forked for this: the same, with its output in a file."""
    file = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.update(environment)
    main(words)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
