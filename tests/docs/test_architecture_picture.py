"""The picture of the architecture shows the tables from which it is drawn, and can be read."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ElementTree

from ..test_architecture import ROOMS_OF_CORE
from . import ROOT, architecture


def test_the_committed_picture_is_what_the_script_draws() -> None:
    assert architecture.PICTURE.read_text(encoding="utf-8") == architecture.picture(), architecture.__doc__


def test_every_folder_has_a_box_a_question_and_names_that_exist() -> None:
    assert not architecture.missing()
    assert architecture.questions().keys() == architecture.boxes().keys() == ROOMS_OF_CORE.keys()
    for thing in ("gradient", "checkpoint"):
        assert len(architecture.way(thing)) > 2
        assert set(architecture.way(thing)) <= ROOMS_OF_CORE.keys()


def test_arrows_imply_no_import_that_they_leave_out() -> None:
    below = {folder: {to for start, to in architecture.arrows() if start == folder} for folder in ROOMS_OF_CORE}
    for folder, allowed in ROOMS_OF_CORE.items():
        reached, left = set(), [*below[folder]]
        while left:
            reached.add(left[-1])
            left += below[left.pop()]
        assert allowed <= reached, folder


def test_boxes_are_apart_and_questions_fit_into_them() -> None:
    places = [(box.column, box.y) for box in architecture.boxes().values()]
    assert len(set(places)) == len(places)
    assert architecture.BOX_HEIGHT < architecture.ROW
    name_space = {"svg": "http://www.w3.org/2000/svg"}
    texts = ElementTree.fromstring(architecture.picture()).findall("svg:text", name_space)
    rows = [(float(text.get("x", 0)), float(text.get("y", 0)), text.text or "", text.get("class")) for text in texts]
    for box in architecture.boxes().values():
        inside = [row for row in rows if row[0] == box.x + 12 and box.y < row[1] < box.y + architecture.BOX_HEIGHT]
        assert inside[0][2:] == (box.name, "name")
        assert " ".join(row[2] for row in inside[1:]) == architecture.questions()[box.name]
        assert max(row[1] for row in inside) < box.y + architecture.BOX_HEIGHT - 4
        assert max(len(row[2]) for row in inside) * architecture.LETTER < architecture.BOX_WIDTH - 12


def test_the_page_describes_each_step_of_the_ways() -> None:
    page = (ROOT / "docs" / "design" / "architecture.md").read_text(encoding="utf-8")
    for thing in ("gradient", "checkpoint"):
        section = page.partition(f"## The way of a {thing}\n")[2].partition("\n## ")[0]
        steps = re.findall(r"^\| \d \| `(\w+)` \| `(\w+)` \|", section, re.MULTILINE)
        stops = architecture.way(thing)
        assert steps == list(itertools.pairwise(stops))
