"""One fault, as it is put into a copy of the package."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Breakage:
    """A fault, and the tests that fail with it.

    Attributes:
        what: in words, as it would stand in a bug report.
        file: in the package.
        before, after: text of the file, which has ``before`` once.
        tests: what pytest is given, and what fails.
    """

    what: str
    file: str
    before: str
    after: str
    tests: str

    def apply(self, text: str) -> str:
        """The file's text with the fault in it."""
        if text.count(self.before) != 1:
            raise ValueError(f"{self.file} has {text.count(self.before)} times: {self.before!r}")
        return text.replace(self.before, self.after)
