"""A program over three ranks with the fake worker, as users write theirs: without a guard for `__main__`.

For tests only; `python script.py [trouble] [how it ends]`, where a trouble is `rank:where:what`.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tests.parallel.fake_worker import FakeWorker, Trouble, plan_of

from longfill.config import EngineArgs
from longfill.engine.executors import make_executor

trouble, end = sys.argv[1], sys.argv[2]
executor = make_executor(
    EngineArgs(tensor_parallel_size=3, distributed_timeout_seconds=60.0), Path("nowhere"), None, FakeWorker
)
for _ in range(2):
    executor.execute(plan_of(), ())
print("ready", flush=True)
if trouble != "none":
    rank, where, what = trouble.split(":")
    executor.execute(plan_of(Trouble(int(rank), where, what)), ())
if end == "wait":
    time.sleep(600)
if end == "raise":
    raise ValueError("the program fails")
if end == "exit":
    sys.exit(7)
