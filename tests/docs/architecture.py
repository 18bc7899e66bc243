"""The picture of the architecture, drawn by ``python -m tests.docs.architecture`` from the tables that hold it.

Folders and arrows are those of ``ROOMS_OF_CORE``, questions and the two ways those of ``megastrategy/core/README.md``.
"""

from __future__ import annotations

import itertools
import re
import textwrap
from collections import Counter
from dataclasses import dataclass
from html import escape

from ..test_architecture import CORE, MAY_IMPORT, ROOMS_OF_CORE
from . import ROOT

PICTURE = ROOT / "docs" / "design" / "architecture.svg"

DOORS = {"lightning": "Lightning", "fabric": "Fabric", "accelerate": "Accelerate", "ray": "Ray Train"}
FACES = {"distributed_data_parallel": "DistributedDataParallel", "distributed_optimizer": "DistributedOptimizer"}
RIGHT_COLUMN = {"judge", "states", "optimizer", "checkpoint"}

WIDTH, BOX_WIDTH, BOX_HEIGHT, ROW = 800, 310, 58, 74
COLUMN_X = (60, 430)
TOP = 176  # of the highest folder's box
LETTER = 5.9  # mean width of a letter of 11 px, rounded up
GRADIENT, CHECKPOINT = "#c2410c", "#1d4ed8"


@dataclass(frozen=True)
class Box:
    """One folder's place, in pixels; ``column`` 0 is the left one."""

    name: str
    column: int
    x: float
    y: float

    @property
    def middle(self) -> float:
        return self.x + BOX_WIDTH / 2


def questions() -> dict[str, str]:
    """Each folder's question, from the table in core's README."""
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+?) \|", (CORE / "README.md").read_text(), re.MULTILINE)
    return {name: question.replace("`", "") for name, question in rows}


def way(thing: str) -> list[str]:
    """The folders through which a gradient or a checkpoint goes, from the sentence in core's README."""
    [sentence] = re.findall(rf"^A {thing} goes through (.*?)[:.]$", (CORE / "README.md").read_text(), re.M | re.S)
    return re.findall(r"`(\w+)`", sentence)


def floors() -> dict[str, int]:
    """The longest chain of imports below each folder."""
    found: dict[str, int] = {}
    while len(found) < len(ROOMS_OF_CORE):
        for folder, below in ROOMS_OF_CORE.items():
            if below <= found.keys():
                found[folder] = max((found[each] + 1 for each in below), default=0)
    return found


def boxes() -> dict[str, Box]:
    at, highest = floors(), max(floors().values())
    columns = {name: int(name in RIGHT_COLUMN) for name in ROOMS_OF_CORE}
    return {
        name: Box(name, columns[name], COLUMN_X[columns[name]], TOP + (highest - at[name]) * ROW)
        for name in ROOMS_OF_CORE
    }


def arrows() -> list[tuple[str, str]]:
    """The imports that no chain of other imports implies."""
    return [
        (folder, below)
        for folder, all_below in ROOMS_OF_CORE.items()
        for below in sorted(all_below)
        if not any(below in ROOMS_OF_CORE[other] for other in all_below)
    ]


class Drawing:
    """Collects the elements of an SVG."""

    def __init__(self) -> None:
        self.elements: list[str] = []
        self.ports: Counter[tuple[str, str]] = Counter()
        self.lanes: Counter[str] = Counter()

    def text(self, x: float, y: float, text: str, look: str = "", **attributes: object) -> None:
        given = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in attributes.items())
        kind = f' class="{look}"' if look else ""
        self.elements.append(f'<text x="{x:g}" y="{y:g}"{kind}{given}>{escape(text, quote=False)}</text>')

    def rect(self, x: float, y: float, width: float, height: float, look: str) -> None:
        self.elements.append(f'<rect class="{look}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6"/>')

    def line(self, points: list[tuple[float, float]], look: str) -> None:
        joined = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.elements.append(f'<polyline class="{look}" points="{joined}" marker-end="url(#{look})"/>')

    def _port(self, box: Box, side: str) -> tuple[float, float]:
        self.ports[box.name, side] += 1
        x = box.x if side == "left" else box.x + BOX_WIDTH
        low = 7 * (side == "left" and box.column == 1)  # else arrows to both sides of the gap would be one line
        return x, box.y + 13 * self.ports[box.name, side] - 1 + low

    def hop(self, start: Box, end: Box, number: int, look: str, color: str) -> None:
        """A step of a way: in the gap between the columns, or outside of the column that both are in."""
        if start.column != end.column:
            lane, sides = "gap", ("right", "left") if start.column == 0 else ("left", "right")
        else:
            lane = side = ("left", "right")[start.column]
            sides = (side, side)
        first, last = self._port(start, sides[0]), self._port(end, sides[1])
        offset = 16 * self.lanes[lane]
        self.lanes[lane] += 1
        edge = COLUMN_X[start.column] + (BOX_WIDTH if lane == "right" else 0)
        x = {"gap": COLUMN_X[0] + BOX_WIDTH + 22 + offset, "left": edge - 14 - offset, "right": edge + 14 + offset}[
            lane
        ]
        self.line([first, (x, first[1]), (x, last[1]), last], look)
        y = (first[1] + last[1]) / 2
        self.elements.append(f'<circle cx="{x:g}" cy="{y:g}" r="7" fill="{color}"/>')
        self.text(x, y + 3.5, str(number), "number")


STYLE = f"""\
text {{ font: 11px Helvetica, Arial, sans-serif; fill: #374151 }}
.name {{ font: bold 13px Menlo, Consolas, monospace; fill: #111827 }}
.title {{ font: bold 12px Helvetica, Arial, sans-serif; fill: #111827 }}
.number {{ font: bold 9px Helvetica, Arial, sans-serif; fill: #ffffff; text-anchor: middle }}
.page {{ fill: #ffffff }}
.core {{ fill: #f9fafb; stroke: #d1d5db }}
.folder {{ fill: #ffffff; stroke: #6b7280 }}
.face {{ fill: #eef2ff; stroke: #6366f1 }}
.door {{ fill: #ecfdf5; stroke: #10b981 }}
polyline {{ fill: none; stroke-width: 2 }}
.import {{ stroke: #9ca3af; stroke-width: 1.2 }}
.gradient {{ stroke: {GRADIENT} }}
.checkpoint {{ stroke: {CHECKPOINT} }}
"""


def _heads() -> str:
    colors = {"import": "#9ca3af", "gradient": GRADIENT, "checkpoint": CHECKPOINT}
    return "".join(
        f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto" '
        f'markerUnits="userSpaceOnUse"><path d="M0,0 L8,4 L0,8 z" fill="{color}"/></marker>\n'
        for name, color in colors.items()
    )


def _doors_and_faces(drawing: Drawing, places: dict[str, Box]) -> None:
    drawing.text(60, 22, "doors: how a script enters", "title")
    names = [*DOORS.values(), "a plain loop"]
    width = (COLUMN_X[1] + BOX_WIDTH - COLUMN_X[0] - 10 * (len(names) - 1)) / len(names)
    for number, name in enumerate(names):
        x = COLUMN_X[0] + number * (width + 10)
        drawing.rect(x, 32, width, 28, "door")
        drawing.text(x + width / 2, 50, name, text_anchor="middle")
    drawing.text(60, 96, "megastrategy/core", "title")
    for column, name in enumerate(FACES.values()):
        x = COLUMN_X[column]
        highest = min(box.y for box in places.values() if box.column == column)
        drawing.line([(x + BOX_WIDTH / 2, 60), (x + BOX_WIDTH / 2, 104)], "import")
        drawing.rect(x, 104, BOX_WIDTH, 34, "face")
        drawing.text(x + BOX_WIDTH / 2, 126, name, "name", text_anchor="middle")
        drawing.line([(x + BOX_WIDTH / 2, 138), (x + BOX_WIDTH / 2, highest)], "import")


def _imports(drawing: Drawing, places: dict[str, Box]) -> None:
    for upper, lower in ((places[a], places[b]) for a, b in arrows()):
        if upper.column == lower.column:
            drawing.line([(upper.middle, upper.y + BOX_HEIGHT), (lower.middle, lower.y)], "import")
        else:
            inner = {0: COLUMN_X[0] + BOX_WIDTH, 1: COLUMN_X[1]}
            points = [(inner[box.column], box.y + BOX_HEIGHT - 6) for box in (upper, lower)]
            drawing.line(points, "import")


def _legend(drawing: Drawing, y: float) -> None:
    for number, (look, color, text) in enumerate(
        (
            ("gradient", GRADIENT, "the way of a gradient: " + " → ".join(way("gradient"))),
            ("checkpoint", CHECKPOINT, "the way of a checkpoint: " + " → ".join(way("checkpoint"))),
            (
                "import",
                "#374151",
                "imports, without those that a chain of other arrows implies",
            ),
        )
    ):
        drawing.line([(60, y + 20 * number), (92, y + 20 * number)], look)
        drawing.text(102, y + 20 * number + 4, text, fill=color)


def picture() -> str:
    """The picture, as the text of an SVG."""
    drawing, places = Drawing(), boxes()
    bottom = max(box.y for box in places.values()) + BOX_HEIGHT
    height = bottom + 84
    drawing.rect(0, 0, WIDTH, height, "page")
    drawing.rect(4, 76, WIDTH - 8, bottom - 76 + 12, "core")
    _doors_and_faces(drawing, places)
    _imports(drawing, places)
    for name, box in places.items():
        drawing.rect(box.x, box.y, BOX_WIDTH, BOX_HEIGHT, "folder")
        drawing.text(box.x + 12, box.y + 18, name, "name")
        for number, line in enumerate(textwrap.wrap(questions()[name], int((BOX_WIDTH - 24) / LETTER))):
            drawing.text(box.x + 12, box.y + 34 + 14 * number, line)
    for thing, color in (("gradient", GRADIENT), ("checkpoint", CHECKPOINT)):
        stops = [places[name] for name in way(thing)]
        for number, (start, end) in enumerate(itertools.pairwise(stops), start=1):
            drawing.hop(start, end, number, thing, color)
    _legend(drawing, bottom + 30)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" role="img">\n'
        "<title>Doors, faces and folders of megastrategy, with the way of a gradient and of a checkpoint</title>\n"
        f"<style>\n{STYLE}</style>\n<defs>\n{_heads()}</defs>\n" + "\n".join(drawing.elements) + "\n</svg>\n"
    )


def missing() -> set[str]:
    """Names in this file's lists that the package does not have."""
    files = {path.stem for path in CORE.glob("*.py")}
    return (DOORS.keys() - MAY_IMPORT.keys()) | (FACES.keys() - files) | (RIGHT_COLUMN - ROOMS_OF_CORE.keys())


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
