"""The report of `bench serve`: from a load to the values that `--json` prints.

Imports the other serve_* files. Invariant: a run with a failed request, or whose figures are of something else than
what was asked for, did not succeed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from longfill.bench.serve import Load, LoadPlan
from longfill.bench.serve_checks import (
    Check,
    check_cache,
    check_client,
    check_load,
    check_outputs,
    check_prompt_lengths,
    failures,
)
from longfill.bench.serve_metrics import Wanted, summarize


def to_values(plan: LoadPlan, load: Load, wanted: Wanted, *, detailed: bool) -> dict[str, Any]:
    """What `--json` prints."""
    workload, target = plan.workload, plan.target
    return {
        "base_url": target.base_url,
        "endpoint": target.endpoint,
        "model": load.model,
        "prompts": load.prompts.name,
        "seed": workload.seed,
        "num_prompts": workload.num_prompts,
        "num_warmups": plan.num_warmups,
        "request_rate": workload.request_rate,
        "burstiness": workload.burstiness,
        "max_concurrency": plan.max_concurrency,
        "random_range_ratio": workload.range_ratio,
        "random_prefix_len": workload.prefix_len,
        "fields": dict(target.fields),
        "metrics": list(wanted.metrics),
        "percentiles": list(wanted.percentiles),
        "goodput": dict(wanted.goodput),
        **summarize(load.answers, workload.classes, wanted),
        "failures": failures(load.answers),
        "checks": [{"name": c.name, "level": c.level, "message": c.message} for c in _checks(plan, load)],
        "requests": [answer.to_json(detailed=detailed) for answer in load.answers],
    }


def succeeded(values: Mapping[str, Any]) -> bool:
    """Whether no request failed and the figures are of what was asked for."""
    return not values["failures"] and all(check["level"] != "error" for check in values["checks"])


def _checks(plan: LoadPlan, load: Load) -> list[Check]:
    good = [answer for answer in load.answers if answer.failure is None]
    if not good:
        return []
    return [
        check_prompt_lengths(good, load.prompts.added),
        check_cache(good, plan.workload.prefix_len + load.prompts.added),
        *check_outputs(good, ignore_eos=bool(plan.target.fields.get("ignore_eos"))),
        check_client(good, load.lags, load.cpu_share),
        check_load(load.answers, paced=math.isfinite(plan.workload.request_rate)),
    ]
