"""One contender of ``tierkv bench restore``, in a process of its own.

``python -m tierkv.benchmarks.restore_child KIND`` answers, over its standard streams, what ``ASKED`` of it has.
"""

import sys
from typing import Final

from tierkv.benchmarks.restore_contenders import Contender, SafetensorsFile, Stock, TorchFile
from tierkv.benchmarks.restore_process import serve
from tierkv.benchmarks.restore_tierkv import Tiered

KINDS: Final[dict[str, type[Contender]]] = {
    "stock": Stock,
    "torch_load": TorchFile,
    "safetensors": SafetensorsFile,
    "tierkv": Tiered,
}
ASKED: Final = (
    "load", "begin", "cold", "save", "copied", "prefill", "hold", "again", "step_seconds", "restart", "close",
)  # fmt: skip


def main() -> None:
    """Answer until nothing more is asked."""
    contender = KINDS[sys.argv[1]]()
    try:
        serve({name: getattr(contender, name) for name in ASKED if hasattr(contender, name)})
    finally:
        contender.close()


if __name__ == "__main__":
    main()
