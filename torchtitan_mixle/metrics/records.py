"""Reading metrics.jsonl back, also one that a killed run left with half a line."""

import json
from pathlib import Path
from typing import Any


def read_records(folder: Path) -> list[dict[str, Any]]:
    """The records of a run's metrics.jsonl, each step once; none where there is no file."""
    try:
        text = (folder / "metrics.jsonl").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    records: dict[int, dict[str, Any]] = {}
    for line in text.splitlines():
        try:
            record = json.loads(line)
            records[int(record["step"])] = record
        except (ValueError, KeyError, TypeError):
            continue
    return [records[step] for step in sorted(records)]
