"""Which executor runs an engine's ranks.

May import all of them. Invariant: what was asked for is what runs, or an error says what contradicts it.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

from longfill.config import LAUNCH_VARIABLES, EngineArgs
from longfill.engine.executors.interface import Executor
from longfill.engine.executors.launch import Launch
from longfill.engine.executors.messages import MakeWorker
from longfill.engine.executors.spawn import spawn
from longfill.engine.executors.torchrun import join
from longfill.engine.executors.uni import UniExecutor
from longfill.errors import ConfigError
from longfill.host import default_threads
from longfill.models.config import ModelConfig
from longfill.parallel import Mesh
from longfill.partition.mesh import MeshShape
from longfill.worker.worker import Worker

_FLAG = "--distributed-executor-backend"


def make_executor(args: EngineArgs, folder: Path, config: ModelConfig, make_worker: MakeWorker = Worker) -> Executor:
    """Load the model on all ranks.

    Where torchrun has started this process as another rank than 0, it follows rank 0 here and ends with SystemExit.
    Raises ConfigError for contradictions, ParallelError where ranks do not come together, and what a worker raises.
    """
    backend, shape = executor_backend(args), mesh_shape(args)
    if backend == "uni":
        return UniExecutor(make_worker(args, folder, config, Mesh.single()))
    if backend == "mp":
        return spawn(_with_threads(args, shape.world), folder, config, shape, make_worker)
    launch = _launch()
    return join(launch, _with_threads(args, launch.local_world), folder, config, shape, make_worker)


def executor_backend(args: EngineArgs) -> Literal["uni", "mp", "external_launcher"]:
    """What `auto` stands for, or what was asked for. Raises ConfigError for what contradicts the number of ranks."""
    backend, ranks = args.distributed_executor_backend, args.num_ranks
    if backend == "uni" and ranks > 1:
        raise ConfigError(f"{_FLAG} uni runs one rank, but {_sizes(args)} need {ranks}: leave one of them out")
    if backend == "auto":
        if not args.is_launched:
            return "uni" if ranks == 1 else "mp"
        backend = "external_launcher"
    if backend == "external_launcher":
        launch = _launch()
        if launch.world != ranks:
            raise ConfigError(
                f"WORLD_SIZE is {launch.world}, but {_sizes(args)} need {ranks} ranks: start as many, or give {_FLAG} "
                "uni or mp for an engine of its own in every process"
            )
    return backend


def mesh_shape(args: EngineArgs) -> MeshShape:
    """The mesh that the sizes make."""
    return MeshShape(
        tp=args.tensor_parallel_size,
        pcp=args.prefill_context_parallel_size,
        dcp=args.decode_context_parallel_size,
    )


def _launch() -> Launch:
    launch = Launch.from_environment()
    if launch is None:
        raise ConfigError(
            f"{_FLAG} external_launcher: {', '.join(LAUNCH_VARIABLES)} are not all in the environment; start with "
            "torchrun"
        )
    return launch


def _sizes(args: EngineArgs) -> str:
    return (
        f"--tensor-parallel-size {args.tensor_parallel_size} and --prefill-context-parallel-size "
        f"{args.prefill_context_parallel_size}"
    )


def _with_threads(args: EngineArgs, local_ranks: int) -> EngineArgs:
    """Each rank's threads: as given, or its part of this machine's."""
    return dataclasses.replace(args, num_threads=args.num_threads or default_threads(local_ranks))
