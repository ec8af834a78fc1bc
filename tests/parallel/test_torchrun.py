"""The engine's own ranks, however they are started, give one rank's digest with prefill context parallelism."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.parallel.processes import rank_processes, wait_until_gone

from longfill import LLM, SamplingParams
from longfill.errors import EngineDeadError, ParallelError

ENGINE: dict[str, Any] = {
    "max_model_len": 1024, "num_gpu_blocks_override": 40, "memory_budget": "3GiB", "num_threads": 1, "digest": True,
    "distributed_timeout_seconds": 60.0, "max_num_batched_tokens": 256,
}  # fmt: skip
PROMPT = "The access code of amber falcon is 48215. The access code of amber falcon is"
FLAGS = [
    word for name, value in ENGINE.items() if name != "digest" for word in (f"--{name.replace('_', '-')}", str(value))
] + ["--digest"]  # fmt: skip
SCRIPT = f"""
from longfill import LLM, SamplingParams

with LLM("needle", prefill_context_parallel_size=2, **{ENGINE!r}) as llm:
    [output] = llm.generate({PROMPT!r}, SamplingParams(temperature=0, max_tokens=5))
    print("digest", output.digest)
print("only rank 0 comes here")
"""


@pytest.fixture(scope="module")
def one_rank() -> str:
    """The digest of a single rank."""
    with LLM("needle", **ENGINE) as llm:
        return ask(llm)


def ask(llm: LLM) -> str:
    [output] = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=5))
    assert output.digest is not None
    return output.digest


@pytest.fixture(autouse=True)
def _no_process_is_left() -> Iterator[None]:
    yield
    gc.collect()
    wait_until_gone(rank_processes(), 5.0)


def torchrun(*words: str, expected: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *words]
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=variables, text=True, capture_output=True, timeout=120)
    assert (done.returncode == 0) == (expected == 0), done.stderr
    return done


def test_spawned_ranks_give_one_ranks_digest(one_rank: str) -> None:
    with LLM("needle", prefill_context_parallel_size=2, **ENGINE) as llm:
        processes = rank_processes()
        assert len(processes) == 2
        assert ask(llm) == one_rank
        assert ask(llm) == one_rank  # after a prefix hit
    wait_until_gone(processes, 0.0)
    with pytest.raises(EngineDeadError, match="the engine has been closed; make a new one"):
        ask(llm)


def test_a_closed_engine_of_one_rank_says_so_too() -> None:
    llm = LLM("needle", **ENGINE)
    llm.close()
    llm.close()
    with pytest.raises(EngineDeadError, match="the engine has been closed; make a new one"):
        ask(llm)


@pytest.mark.parametrize("more", [{}, {"async_scheduling": True}], ids=str)
def test_a_rank_that_dies_between_steps_ends_the_engine_with_its_name(more: dict[str, Any]) -> None:
    llm = LLM("needle", prefill_context_parallel_size=2, **ENGINE, **more)
    [follower] = [each for each in rank_processes() if each.parent() != psutil.Process()]
    steps = 0

    def kill_in_the_second_step(_: object) -> None:
        nonlocal steps
        steps += 1
        if steps == 2:
            follower.send_signal(signal.SIGKILL)

    params = SamplingParams(temperature=0, max_tokens=500, ignore_eos=True)
    with pytest.raises((ParallelError, EngineDeadError), match=rf"rank 1 \(.*, pid {follower.pid}\) died \(signal 9\)"):
        llm.generate(PROMPT, params, on_step=kill_in_the_second_step)
    with pytest.raises(EngineDeadError, match=rf"pid {follower.pid}\) died \(signal 9\)"):
        ask(llm)
    llm.close()


def test_a_script_under_torchrun_goes_on_at_rank_0_only(tmp_path: Path, one_rank: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = torchrun(str(script))
    assert done.stdout.splitlines() == [f"digest {one_rank}", "only rank 0 comes here"]
    assert "Traceback" not in done.stderr


def test_the_command_line_under_torchrun_prints_once(tmp_path: Path, one_rank: str) -> None:
    script = tmp_path / "cli.py"
    script.write_text("from longfill.cli.main import main\nif __name__ == '__main__':\n    main()\n")
    words = ["run", "needle", "--prefill-context-parallel-size", "2", *FLAGS, "--prompt", PROMPT, "--max-tokens", "5"]
    done = torchrun(str(script), *words, "--json")
    assert json.loads(done.stdout)["digest"] == one_rank
    done = torchrun(str(script), *words, "--tensor-parallel-size", "2", expected=1)
    assert "WORLD_SIZE is 2, but --tensor-parallel-size 2 and --prefill-context-parallel-size 2 need 4" in done.stderr
    done = torchrun(str(script), "serve", "needle", "--port", "0", "--prefill-context-parallel-size", "2", expected=1)
    assert "a server starts its ranks itself" in done.stderr
