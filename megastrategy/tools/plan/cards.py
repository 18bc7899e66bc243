"""Names the devices of a pipeline, which may differ."""

from __future__ import annotations

import dataclasses
import re

from .memory import parse_bytes


@dataclasses.dataclass(frozen=True)
class Card:
    """A device: what it is called, its memory in bytes, and the floating-point operations it does in a second.

    ``flops`` is what is sustained; where the vendor's peak is given, times are lower bounds, and their ratios hold.
    """

    name: str
    memory_bytes: int
    flops: float


KNOWN = {
    card.name: card
    for card in (
        # Peaks in fp32 without tensor cores, from the vendor's sheets.
        Card("2080", 8 * 10**9, 10.1e12),
        Card("2080ti", 11 * 10**9, 13.4e12),
        Card("3090", 24 * 10**9, 35.6e12),
        Card("4090", 24 * 10**9, 82.6e12),
        Card("a100", 80 * 10**9, 19.5e12),
        Card("h100", 80 * 10**9, 66.9e12),
    )
}
"""By name."""


_FLOPS = {"PFLOPS": 1e15, "TFLOPS": 1e12, "GFLOPS": 1e9}


def parse_flops(text: str) -> float:
    """Reads ``200TFLOPS``, floating-point operations a second. Raises ValueError for other text."""
    match = re.fullmatch(rf"(\d+(?:\.\d+)?)({'|'.join(_FLOPS)})", text.strip())
    if match is None or float(match[1]) == 0:
        raise ValueError(f"{text!r}: expected operations in a second ({', '.join(_FLOPS)}), such as 200TFLOPS")
    return float(match[1]) * _FLOPS[match[2]]


def parse_cards(text: str) -> list[Card]:
    """Reads ``3090:2,2080ti:1``, or for unknown cards ``mine=24GB@35.6TFLOPS:2``. Raises ValueError for other text."""
    cards: list[Card] = []
    for part in text.split(","):
        match = re.fullmatch(r"([\w-]+)(?:=([^@:]+)@([^@:]+))?(?::([0-9]+))?", part.strip())
        if match is None or match[4] == "0":
            raise ValueError(f"{part!r}: expected a card and how many, such as 3090:2, or mine=24GB@35.6TFLOPS:2")
        name, memory, speed, number = match.groups()
        if memory is not None:
            card = Card(name, parse_bytes(memory), parse_flops(speed))
        elif name.lower() in KNOWN:
            card = KNOWN[name.lower()]
        else:
            raise ValueError(
                f"the card {name!r} is not known ({', '.join(KNOWN)}): say its memory and speed, such as "
                f"{name}=24GB@35.6TFLOPS:{number or 1}"
            )
        cards += [card] * int(number or 1)
    return cards
