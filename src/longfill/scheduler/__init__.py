"""Who gets how many tokens in the next step."""

from longfill.scheduler.schedule import Schedule, ScheduledRequest
from longfill.scheduler.scheduler import Scheduler

__all__ = ["Schedule", "ScheduledRequest", "Scheduler"]
