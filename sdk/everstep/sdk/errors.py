"""The root of what everstep raises on purpose."""

from __future__ import annotations


class EverstepError(Exception):
    """Root of everything raised on purpose: its text is for the person who reads it at 3 a.m."""
