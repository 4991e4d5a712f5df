"""How things are measured: the device, the clock, and whether the cores were ours."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

PROBE_SECONDS = 0.05
QUIET_SHARE = 0.9
"""Below this share of its threads' time, arithmetic that needs nothing but cores did not get them."""


def prepare(device: str, *, seed: int, threads: int | None) -> str:
    """Set threads and seed and say which device `auto` is; `cuda` without a GPU is refused."""
    if threads is not None:
        torch.set_num_threads(threads)
    torch.manual_seed(seed)
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        built = "finds no GPU" if torch.version.cuda else "is built without CUDA"
        raise ValueError(
            f"--device cuda: torch {torch.__version__} {built}; use --device cpu, or auto for what there is"
        )
    return device


@dataclass
class Timings:
    """Wall times of one thing done repeatedly, and the CPU time of this process over the same spans, in seconds."""

    wall: list[float] = field(default_factory=list)
    cpu: float = 0.0

    def time(self, device: str, work: Callable[[], object]) -> float:
        """Do the work once and add it, waiting for the device at both ends; its seconds."""
        synchronise(device)
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        synchronise(device)
        elapsed = time.perf_counter() - wall
        self.wall.append(elapsed)
        self.cpu += time.process_time() - cpu
        return elapsed

    @property
    def milliseconds(self) -> list[float]:
        """Every sample."""
        return [seconds * 1e3 for seconds in self.wall]

    @property
    def cpu_over_wall(self) -> float:
        """Cores kept busy on average."""
        return self.cpu / sum(self.wall)


def quantile(samples: list[float], share: float) -> float:
    """The value below which this share of the samples lies, between neighbours in proportion."""
    if len(samples) == 1:
        return samples[0]
    return statistics.quantiles(samples, n=100, method="inclusive")[round(share * 100) - 1]


def synchronise(device: str) -> None:
    """Wait until the device has done all it was given; the CPU has."""
    if device == "cuda":
        torch.cuda.synchronize()


def load_average() -> float | None:
    """Processes that ran or waited for a core over the last minute; None where the system does not tell."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


class Quiet:
    """Whether the cores were ours: matrix products, made between the timed spans, ask for every thread's full time.

    They touch little memory and never wait, so CPU time falls behind threads x wall time only if others ran.
    """

    def __init__(self) -> None:
        self._factor = torch.rand(512, 512)
        self._timings = Timings()

    def probe(self) -> None:
        """Ask for the cores for a twentieth of a second."""
        end = time.perf_counter() + PROBE_SECONDS
        while time.perf_counter() < end:
            self._timings.time("cpu", lambda: self._factor @ self._factor)

    @property
    def unquiet(self) -> bool:
        """Others took more than a tenth of the time."""
        return self._timings.cpu_over_wall < QUIET_SHARE * torch.get_num_threads()


def largest_allocation(device: str, work: Callable[[], object]) -> int:
    """Bytes of the largest single allocation that the work makes on the device, from the profiler's memory events."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    with profile(activities=activities, profile_memory=True) as profiler:
        work()
        synchronise(device)
    with TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    kind = 1 if device == "cuda" else 0
    return max(
        (
            event["args"]["Bytes"]
            for event in events
            if event["name"] == "[memory]" and event["args"]["Device Type"] == kind
        ),
        default=0,
    )
