"""The most memory that a process held while something ran."""

import resource
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import torch

_KIB: Final = 1024
_RESET_PEAK: Final = "5"


class PeakMemory:
    """Begins to watch when it is made.

    Linux keeps the peak of a process's resident memory and lets it be reset; where it does not, the peak since the
    process began is what is told, and that is said.
    """

    def __init__(self, device: torch.device) -> None:
        """Watch this process, and a GPU's memory where the model lies on one."""
        self._device = device
        self.since = "the sample began"
        try:
            Path("/proc/self/clear_refs").write_text(_RESET_PEAK, encoding="ascii")
        except OSError:
            self.since = "the process began"
        self._before = _status("VmRSS")
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def measures(self) -> dict[str, Any]:
        """Return ``peak_rss_bytes``, ``rss_before_bytes``, ``peak_rss_since`` and ``peak_device_memory_bytes`` (CUDA)."""
        peak = _status("VmHWM") if self.since == "the sample began" else None
        if peak is None:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB
        on_device = torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else None
        return {
            "peak_rss_bytes": peak,
            "rss_before_bytes": self._before,
            "peak_rss_since": self.since,
            "peak_device_memory_bytes": on_device,
        }


def _status(name: str) -> int | None:
    """Return bytes that the kernel tells of this process, or None where it tells nothing."""
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * _KIB
    return None
