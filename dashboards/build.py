"""Writes the dashboards' JSON: ``python -m dashboards.build``.

The JSON is what people import and what the ConfigMaps are made of. It is checked in, and a test compares it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from dashboards import fleet, gpu, server

FOLDER: Final = Path(__file__).parent
BOARDS: Final = {"fleet.json": fleet.board, "server.json": server.board, "gpu.json": gpu.board}


def documents() -> Mapping[str, str]:
    """Build the content of each file."""
    return {
        name: json.dumps(board(), cls=JSONEncoder, indent=2, ensure_ascii=False, sort_keys=True) + "\n"
        for name, board in BOARDS.items()
    }


def main() -> int:
    """Write the files beside this program. Returns the exit status."""
    for name, content in documents().items():
        (FOLDER / name).write_text(content, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
