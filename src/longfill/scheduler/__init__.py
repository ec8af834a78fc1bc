"""Who gets how many tokens in the next step."""

from longfill.scheduler.config import SchedulerConfig, scheduler_config
from longfill.scheduler.schedule import UNKNOWN, Schedule, ScheduledRequest
from longfill.scheduler.scheduler import Advance, Scheduler

__all__ = ["UNKNOWN", "Advance", "Schedule", "ScheduledRequest", "Scheduler", "SchedulerConfig", "scheduler_config"]
