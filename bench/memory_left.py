"""What memory is left on the device, asked before much of it is taken, so that nothing swaps or is killed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

KEPT_BACK = 16
"""One part in so many of what is left stays unused, for what others and the allocator take meanwhile."""

CGROUPS = Path("/sys/fs/cgroup")


def memory_left(device: str) -> int | None:
    """Bytes that may still be taken on the device; None where nobody says.

    Of a CPU the least of what Linux calls available and what the process's control groups allow.
    """
    told = [_free_on_gpu()] if device == "cuda" else [_available(), _allowed()]
    left = min((bytes for bytes in told if bytes is not None), default=None)
    return None if left is None else left - left // KEPT_BACK


def out_of_memory(error: Exception) -> bool:
    """Whether memory ran out, or was asked for in sizes that nothing has; torch says so in words alone on a CPU."""
    words = ("can't allocate memory", "Storage size calculation overflowed", "out of memory")
    return isinstance(error, MemoryError) or any(word in str(error) for word in words)


def _free_on_gpu() -> int:
    import torch

    free, _ = torch.cuda.mem_get_info()
    return free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


def _available() -> int | None:
    """What Linux would give without swapping; elsewhere all that the machine has."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) * 1024
    except OSError:
        pass
    if not hasattr(os, "sysconf"):
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _allowed() -> int | None:
    """What the control groups of this process leave, of either version; page cache that can go counts as left."""
    found = [
        _group(folder, *names)
        for folder in _groups()
        for names in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        )
    ]
    return min((left for left in found if left is not None), default=None)


def _groups() -> list[Path]:
    """The folders of this process's groups and of all above them."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    paths = [(parts[1], parts[2].strip("/")) for line in lines if len(parts := line.split(":", 2)) == 3]
    starts = [CGROUPS / path for kind, path in paths if not kind]
    starts += [CGROUPS / "memory" / path for kind, path in paths if "memory" in kind.split(",")]
    return [folder for start in starts for folder in (start, *start.parents) if folder.is_relative_to(CGROUPS)]


def _group(folder: Path, limit: str, usage: str, cached: str) -> int | None:
    try:
        most, used = ((folder / name).read_text(encoding="ascii").strip() for name in (limit, usage))
        counts = _counts((folder / "memory.stat").read_text(encoding="ascii"))
    except OSError:
        return None
    return None if most == "max" else max(0, int(most) - int(used) + counts.get(cached, 0))


def _counts(text: str) -> Mapping[str, int]:
    return {name: int(value) for name, value in (line.split() for line in text.splitlines())}
