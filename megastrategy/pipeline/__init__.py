"""Stages of one model on several ranks: which layers each has (``plan``), the module (``module``), and how torch's
schedules run it (``schedules``)."""

from .module import Pipeline, whole_state_dict

__all__ = ["Pipeline", "whole_state_dict"]
