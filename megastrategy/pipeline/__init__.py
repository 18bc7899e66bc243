"""Stages of one model on several ranks: which layers each has (``plan``), the module (``module``), and how torch's
schedules run it (``schedules``)."""

from .module import Pipeline, load_whole_state_dict, whole_state_dict

__all__ = ["Pipeline", "load_whole_state_dict", "whole_state_dict"]
