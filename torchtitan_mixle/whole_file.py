"""Writing a file so that a process that is killed leaves the old one or the new one, not half of it."""

from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a text file whole or not at all; its folder must be there."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
