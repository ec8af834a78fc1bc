"""Three minutes of the soak whose long form is an hour: `python -m benchmarks.soak`."""

from __future__ import annotations

import pytest
from benchmarks.soak import FLAGS, report, soak


@pytest.mark.slow
def test_mixed_traffic_fails_nothing_and_leaves_nothing_behind():
    values = soak(minutes=3.0, clients=6, flags=FLAGS).to_json()
    assert not any(values["verdict"].values()), f"{report(values)}\n{values['log']}"
    # Every kind of traffic was there, or nothing is said about it.
    assert all(values["sent"].get(kind) for kind in ("left in prefill", "left in stream", "bad body", "long prompt"))
    assert values["tokens"] > 50_000
