"""The slots of jobs for a loop that must not wait: that of a worker, which also sends heartbeats and hears commands."""

from __future__ import annotations

import copy
import logging
from time import monotonic
from typing import Any, Final

from headgate.errors import StoreUnavailable
from headgate.jobs.job_slots import JobSlots

logger = logging.getLogger("headgate")

LONGEST: Final = 0.25  # seconds for a booking, if the store's own time-out is not shorter
PAUSE: Final = 2.5  # seconds without bookings after one that failed or took longer: at most a tenth of the time is lost


class PromptSlots:
    """The slots of *slots*, if the store has them at once; else the jobs ask where they run."""

    def __init__(self, slots: JobSlots, longest: float = LONGEST, pause: float = PAUSE) -> None:
        self._slots = copy.copy(slots)
        self._slots.limiter = slots.limiter.with_timeout(longest)
        self._longest = longest
        self._pause = pause
        self._resume_at = 0.0  # monotonic

    def delay(self, id: str, args: Any = (), kwargs: Any = None) -> float:
        """Seconds after which the job has to come again; 0.0: it may ask where it runs. Raises nothing."""
        begun = monotonic()
        if begun < self._resume_at:
            return 0.0
        delay, degraded = 0.0, False
        try:
            _, delay, degraded = self._slots.decide(id, args, kwargs)
        except StoreUnavailable:
            degraded = True
        except Exception:  # of the key function, or of the limiter: the job raises it too, as its failure
            pass
        ended = monotonic()
        if degraded or ended - begun > self._longest:
            self._resume_at = ended + self._pause
            what = "got no answer" if degraded else f"took {ended - begun:.2f} s"
            logger.warning("a booking %s; for %g s jobs book where they run, in no strict order", what, self._pause)
        return 0.0 if degraded else delay  # `on_store_error` answers a job once, where it runs
