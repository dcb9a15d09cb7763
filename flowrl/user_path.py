"""Paths as users write them, with `~` for the home directory."""

from __future__ import annotations

from pathlib import Path

from flowrl.errors import ConfigError


def user_path(text: str) -> Path:
    """The path. Raises ConfigError if it begins with the home directory of an unknown user."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        home = Path(text).parts[0]
        raise ConfigError(
            f"{text} begins with {home}, and there is no user of that name with a home directory here; write the path "
            "in full, or ./ before it"
        ) from None
