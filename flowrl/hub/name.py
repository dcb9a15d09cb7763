"""Names on the Hub: OWNER/NAME, with @REVISION for a state other than the newest."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Kind = Literal["model", "dataset"]
DEFAULT_REVISION = "main"
WORD = r"[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9_])?"
NAME = re.compile(rf"(?P<repo>{WORD}/{WORD})(?:@(?P<revision>[\w][\w./-]*))?", re.ASCII)
COMMIT = re.compile(r"[0-9a-f]{40}")
LONGEST = 96
"""Maximum number of characters in OWNER/NAME."""


@dataclass(frozen=True)
class HubName:
    """A repository of the Hub, in one of its states."""

    repo: str
    """OWNER/NAME."""
    revision: str = DEFAULT_REVISION
    """Branch, tag or commit."""
    kind: Kind = "model"

    @classmethod
    def parse(cls, text: str, kind: Kind = "model") -> HubName | None:
        """The name in `text`; None if `text` does not have the form of a name on the Hub."""
        found = NAME.fullmatch(text)
        if found is None or len(found["repo"]) > LONGEST or "--" in found["repo"] or ".." in found["repo"]:
            return None
        return cls(found["repo"], found["revision"] or DEFAULT_REVISION, kind)

    def __str__(self) -> str:
        return self.repo if self.revision == DEFAULT_REVISION else f"{self.repo}@{self.revision}"

    @property
    def key(self) -> str:
        """The name's form in a run's record."""
        return f"{self.kind} {self.repo}@{self.revision}"

    @property
    def commit(self) -> str | None:
        """The commit, if the revision is one and not a branch or tag."""
        return self.revision if COMMIT.fullmatch(self.revision) else None
