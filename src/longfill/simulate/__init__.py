"""The real scheduler and page bookkeeping against a virtual clock: what a step would hold, without a model."""

from longfill.simulate.cost import StepCost
from longfill.simulate.simulator import simulate
from longfill.simulate.synthetic import synthetic_trace
from longfill.simulate.trace import TraceRequest, read_trace

__all__ = ["StepCost", "TraceRequest", "read_trace", "simulate", "synthetic_trace"]
