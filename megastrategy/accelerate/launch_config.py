"""The options of a run under the launcher: a YAML file, and environment variables, which go before it."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

from ..core import config_from_arguments
from .plugin import MegatronDDPPlugin

SECTION = "megatron_ddp_config"
"""The key under which a file has our options; all others are accelerate's."""

PREFIX = "MEGATRON_DDP_"

_KNOWN = tuple(field.name for field in dataclasses.fields(MegatronDDPPlugin))
_TYPES = get_type_hints(MegatronDDPPlugin)
_TRUTHS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


class LaunchConfigError(ValueError):
    """Says in one line why a command cannot be launched."""


def read_config_file(path: Path) -> dict[str, Any]:
    """Reads the file. Raises LaunchConfigError if it is missing, or is no YAML file with keys."""
    import yaml  # type: ignore[import-untyped]

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise LaunchConfigError(f"{path}: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise LaunchConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise LaunchConfigError(f"{path}: expected keys, such as {SECTION}: with options under it")
    return content


def plugin_from_launch(path: Path | None, environment: Mapping[str, str]) -> MegatronDDPPlugin:
    """Reads the options under ``megatron_ddp_config:`` of the file, if there is one, and ``MEGATRON_DDP_<FIELD>`` over
    them.

    Text is read as the field's type, in the file as well, where YAML takes ``1e6`` for text.

    Raises:
        LaunchConfigError: for a name that is no option's, with the nearest one, or a value that cannot be.
    """
    options: dict[str, Any] = {}
    origins: dict[str, str] = {}
    if path is not None:
        where = f"{path}, under {SECTION}"
        for key, value in _section(path).items():
            name = str(key)
            _check_name(name, value, where)
            options[name] = _typed(name, value)
            origins[name] = where
    for variable, text in environment.items():
        if variable.startswith(PREFIX):
            name = variable.removeprefix(PREFIX).lower()
            where = f"environment, {variable}"
            _check_name(name, text, where)
            options[name] = _typed(name, text)
            origins[name] = where
    try:
        return MegatronDDPPlugin(**options).launched_with(path)
    except ValueError as error:
        # the messages begin with the field, except those on two fields at once
        where = origins.get(str(error).partition("=")[0]) or "; ".join(dict.fromkeys(origins.values()))
        raise LaunchConfigError(f"{where}: {error}") from error


def _section(path: Path) -> dict[Any, Any]:
    content = read_config_file(path)
    # an option beside the section would be ignored, and the run would train with its default
    misplaced = [key for key in content if key in _KNOWN]
    if misplaced:
        raise LaunchConfigError(f"{path}: {misplaced[0]} stands beside {SECTION}:, and belongs under it")
    if SECTION not in content:
        near = difflib.get_close_matches(SECTION, map(str, content), n=1)
        hint = f"{near[0]!r} is near: " if near else ""
        raise LaunchConfigError(f"{path}: {hint}expected the key {SECTION}: with options under it")
    section = content[SECTION]
    # only the key: the launcher with the defaults
    if section is None:
        return {}
    if not isinstance(section, dict):
        raise LaunchConfigError(f"{path}: {SECTION}={section!r}: expected options under it, as name: value")
    return section


def _check_name(name: str, value: Any, where: str) -> None:
    if name in _KNOWN:
        return
    try:
        config_from_arguments({name: value}, _KNOWN)  # knows arguments of torch DDP that this engine does not have
    except ValueError as error:
        raise LaunchConfigError(f"{where}: {error}") from error
    raise LaunchConfigError(f"{where}: {name} is torch DDP's: set it in DistributedDataParallelKwargs, or leave it out")


def _typed(name: str, value: Any) -> Any:
    """Turns text (and 1e+6, for YAML a float) into a value of the field's type.

    A value that is none comes back as it is, for the config to refuse by name.
    """
    if not isinstance(value, str | float):
        return value
    kinds = get_args(_TYPES[name]) or (_TYPES[name],)
    text = str(value).strip().lower()
    if NoneType in kinds and text in ("none", "null"):
        return None
    # before numbers: "1" turns a flag on
    if bool in kinds:
        return _TRUTHS.get(text, value)
    if int in kinds or float in kinds:
        return _number(text, value, is_integer=float not in kinds)
    return value


def _number(text: str, otherwise: str | float, *, is_integer: bool) -> int | float | str:
    try:
        # exact where a float would round, above 2**53
        return int(text)
    except ValueError:
        pass
    try:
        number = float(text)
    except ValueError:
        return otherwise
    # 1e6 may mean a number of elements, and 1.5 may not: the config refuses it by name
    if not is_integer:
        return number
    return int(number) if math.isfinite(number) and number.is_integer() else otherwise
