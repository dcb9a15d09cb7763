"""Small files that are written completely or not at all."""

from __future__ import annotations

from pathlib import Path

from flowrl.runtime.ledger.ledger_file import sync_file


def write_whole(path: Path, text: str) -> None:
    """Write `text` to a new file that takes the old one's place, durably; after an OSError, the new file is removed."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        sync_file(temporary)  # a rename may reach the disk before the content
        temporary.replace(path)
        sync_file(path.parent)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
