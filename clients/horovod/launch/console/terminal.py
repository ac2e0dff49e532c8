"""What ranks are told about the terminal of the launcher, which they have not themselves."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping


def terminal_size(environ: Mapping[str, str]) -> dict[str, str]:
    """COLUMNS and LINES for the ranks, so that a progress bar fits a terminal that it cannot see."""
    if sys.stderr is None or not sys.stderr.isatty() or "COLUMNS" in environ:
        return {}
    columns, lines = shutil.get_terminal_size()
    return {"COLUMNS": str(max(columns - len("[000]<stderr>:"), 20)), "LINES": str(lines)}
