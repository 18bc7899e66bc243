"""Reads rates with their units."""

from __future__ import annotations

import re

from .simulator import Link

_BYTES_PER_S = {"TB": 1e12, "GB": 1e9, "MB": 1e6, "kB": 1e3, "Tbit": 1e12 / 8, "Gbit": 1e9 / 8, "Mbit": 1e6 / 8}
_HOP_MS = {"ms": 1.0, "us": 1e-3, "ns": 1e-6}
_FLOPS = {"PFLOPS": 1e15, "TFLOPS": 1e12, "GFLOPS": 1e9}
_NUMBER = r"(\d+(?:\.\d+)?)"


def parse_link(text: str) -> Link:
    """Reads ``25GB/s,5us``: a rank's rate in one direction, and the time of a hop, which may be left out. Raises
    ValueError for other text."""
    rate, _, hop = text.replace(" ", "").partition(",")
    found = re.fullmatch(rf"{_NUMBER}({'|'.join(_BYTES_PER_S)})/s", rate)
    hop_found = re.fullmatch(rf"{_NUMBER}({'|'.join(_HOP_MS)})", hop) if hop else None
    if found is None or float(found[1]) == 0 or (hop and hop_found is None):
        units = ", ".join(f"{unit}/s" for unit in _BYTES_PER_S)
        raise ValueError(f"{text!r}: expected a rate ({units}), and a hop's time if it counts, such as 25GB/s,5us")
    hop_ms = float(hop_found[1]) * _HOP_MS[hop_found[2]] if hop_found else 0.0
    return Link(float(found[1]) * _BYTES_PER_S[found[2]] / 1e3, hop_ms)


def parse_flops(text: str) -> float:
    """Reads ``200TFLOPS``, floating-point operations a second. Raises ValueError for other text."""
    found = re.fullmatch(rf"{_NUMBER}({'|'.join(_FLOPS)})", text.strip())
    if found is None or float(found[1]) == 0:
        raise ValueError(f"{text!r}: expected what a device does in a second ({', '.join(_FLOPS)}), such as 200TFLOPS")
    return float(found[1]) * _FLOPS[found[2]]


def describe_link(link: Link) -> str:
    """Says a link in a unit in which it is a small number."""
    nbytes = link.bytes_per_ms * 1e3
    unit = next((unit for unit in ("TB", "GB", "MB") if nbytes >= _BYTES_PER_S[unit]), "kB")
    return f"{nbytes / _BYTES_PER_S[unit]:.3g} {unit}/s a rank and {link.hop_ms * 1e3:.3g} us a hop"
