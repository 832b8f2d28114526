"""Keeps the processes of the stack running, and stops them in order. What it does when, `plan.py` decides."""

import asyncio
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from tools.up import children
from tools.up.logs import Filter, Log
from tools.up.plan import STOP_ORDER, GiveUp, Process, Restart, RestartPolicy

_READ_LOGS_EVERY_S = 0.2
_REAP_EVERY_S = 1.0

Say = Callable[[str, str], None]  # name of a process, a line about it


class GivenUp(Exception):
    """A process cannot run, and starting it again would not help."""

    def __init__(self, name: str, reason: str, log: Path) -> None:
        super().__init__(f"{name}: {reason}; see {log}")
        self.name = name


class Supervisor:
    """The running stack. `run` starts it and returns or raises when it is to end; then `stop` ends it."""

    def __init__(self, processes: Sequence[Process], folder: Path, say: Say, *, verbose: bool = False) -> None:
        self._processes = {process.name: process for process in processes}
        self._status_file = folder / "up.json"
        self._say = say
        self._verbose = verbose
        self._quiet = False
        (folder / "log").mkdir(parents=True, exist_ok=True)
        self._logs = {process.name: Log(folder / "log", process.name) for process in processes}
        self._filters = {process.name: Filter() for process in processes}
        self._children: dict[str, asyncio.subprocess.Process] = {}
        self._starting = asyncio.Lock()
        self._facts: dict[str, object] = {"pid": os.getpid(), "ready": False}

    async def run(self) -> None:
        """Runs until cancelled. Raises GivenUp."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._show_logs())
            tasks.create_task(self._reap_orphans())
            for process in self._processes.values():
                tasks.create_task(self._keep_running(process))

    async def stop(self) -> None:
        """Ends all processes, one after another; `run` must be over. What they say to it stays in the logs."""
        self.show_new_lines()
        self._quiet = True
        for name in STOP_ORDER:
            child = self._children.get(name)
            if child is not None and not await children.stop(child, self._processes[name].stop_limit_s):
                self._say(name, "had to be killed: it did not end when asked to")
        self.kill()

    def kill(self) -> None:
        """Ends at once all that still runs; it may be called again."""
        children.kill_all()
        self.show_new_lines()
        self._status_file.unlink(missing_ok=True)

    def note(self, **facts: object) -> None:
        """Puts facts into the status file."""
        self._facts |= facts
        self._write_status()

    async def _keep_running(self, process: Process) -> None:
        policy = RestartPolicy()
        clock = asyncio.get_running_loop().time
        while True:
            started_at = clock()
            async with self._starting:
                child = await children.start(process.command, process.environment, self._logs[process.name].file)
                self._children[process.name] = child
            self._write_status()
            exit_code = await child.wait()
            self.show_new_lines()  # first why, then that
            match policy.ended(exit_code, ran_s=clock() - started_at):
                case GiveUp(reason) if process.optional:
                    self._say(process.name, f"{reason}; the stack goes on without it")
                    return
                case GiveUp(reason):
                    raise GivenUp(process.name, reason, self._logs[process.name].path)
                case Restart(after_s):
                    self._say(process.name, f"{_how_it_ended(exit_code)}; it starts again in {after_s:g} s")
                    await asyncio.sleep(after_s)

    async def _reap_orphans(self) -> None:
        """Workers whose agent was killed are this process's children, dead ones too."""
        while True:
            await asyncio.sleep(_REAP_EVERY_S)
            async with self._starting:  # a child that is not known yet is no orphan
                children.reap_orphans(known={child.pid for child in self._children.values()})

    async def _show_logs(self) -> None:
        while True:
            await asyncio.sleep(_READ_LOGS_EVERY_S)
            self.show_new_lines()

    def show_new_lines(self) -> None:
        """Puts on the console what the logs have gained and what matters of it."""
        for name, log in self._logs.items():
            for line in log.new_lines():
                important = self._filters[name].shows(line) and not self._quiet
                if important or self._verbose:
                    self._say(name, line)

    def _write_status(self) -> None:
        pids = {name: child.pid for name, child in self._children.items() if child.returncode is None}
        draft = self._status_file.with_suffix(".json.new")
        draft.write_text(json.dumps(self._facts | {"services": pids}, indent=1) + "\n", encoding="utf-8")
        draft.replace(self._status_file)  # whole, or not at all


def _how_it_ended(exit_code: int) -> str:
    return f"was killed by signal {-exit_code}" if exit_code < 0 else f"ended with exit code {exit_code}"
