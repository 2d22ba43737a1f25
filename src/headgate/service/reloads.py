"""How a worker reads its settings again: on SIGHUP, and when a file has changed.

The files are read in a thread, because thousands of descriptors in YAML take about a second and checks go on meanwhile.
The new settings are then put in force in one step of the event loop; bad ones change nothing but the log and the
metrics.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from time import time
from typing import TYPE_CHECKING

from headgate.errors import StoreUnavailable
from headgate.service.event_log import log_rules
from headgate.service.files import FileWatch, LastGoodConfig, Sources, Stamp
from headgate.service.listeners import renew_certificates
from headgate.service.rsgi import HTTPError
from headgate.service.settings import PORTS, BadFile, Settings
from headgate.service.shared_counters import RELOAD_OK, RELOADED_AT, RELOADS, RELOADS_FAILED
from headgate.service.store import CONNECTION_SETTINGS

if TYPE_CHECKING:
    from headgate.service.app import App

logger = logging.getLogger("headgate.service")

# settings that a reload cannot change
NEEDS_RESTART = ("host", *PORTS, "tls", "workers", "store", "max_keys", "log_format", *CONNECTION_SETTINGS)


class Reloads:
    """The reloads of one worker, one at a time; *settings* are those of its start, *stamp* that of its files."""

    def __init__(self, app: App, sources: Sources, settings: Settings, folder: Path, stamp: Stamp) -> None:
        self._app = app
        self._sources = sources
        self._settings = settings
        self._folder = folder
        self._watch = FileWatch(stamp)
        self._task: asyncio.Task[None] | None = None
        self._again = False

    def begin(self) -> None:
        """Read the settings again, in a task; called while it reads, it reads once more."""
        self._again = True
        if self._task is None:
            self._task = asyncio.ensure_future(self._run())

    def look(self) -> None:
        """Begin if a file has changed; called once a second."""
        if self._task is None and self._watch.is_new(self._sources.stamp()):
            self.begin()

    async def aclose(self) -> None:
        """End a reload that is under way."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        try:
            while self._again:
                self._again = False
                await self._reload()
        except Exception:
            logger.exception("Error reading the settings again")
        finally:
            self._task = None

    async def _reload(self) -> None:
        app, before = self._app, self._app.config
        try:
            config = await asyncio.to_thread(self._read, before.settings)
            app.adopt(config)
            config.save(self._folder)
            log_rules(before, config, self._sources.file, self._folder)
        except (BadFile, HTTPError, ValueError, StoreUnavailable) as error:
            app.gauges[RELOADS_FAILED] += 1
            app.gauges[RELOAD_OK] = 0
            logger.error("The new settings are not used, the old ones stay in force: %s", error)
            return
        app.gauges[RELOADS] += 1
        app.gauges[RELOAD_OK], app.gauges[RELOADED_AT] = 1, int(time())
        logger.warning("Settings read again: rules %s", ", ".join(app.state.rule_set.rules))
        await renew_certificates(app.listeners, self._settings.tls)
        for name in NEEDS_RESTART:
            in_force, wanted = getattr(self._settings, name), getattr(config.settings, name)
            if wanted != in_force and (wanted != 0 or in_force is None):  # port 0 means any free port
                logger.warning("The new %s needs a restart", name)

    def _read(self, before: Settings) -> LastGoodConfig:
        """The settings of the files as they are now; runs in a thread."""
        stamp = self._sources.stamp()
        self._watch = FileWatch(stamp)
        settings = self._sources.reread(before)
        stamp = self._sources.stamp(stamp)  # the settings may name other files
        self._watch = FileWatch(stamp)
        domains = self._sources.envoy_domains(settings)
        return LastGoodConfig(settings, self._sources.tokens(settings), stamp, domains)
