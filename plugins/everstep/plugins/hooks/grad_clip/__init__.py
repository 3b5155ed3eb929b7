"""Keeps one bad batch from throwing the weights far away: clips the global gradient norm."""

from everstep.plugins.hooks.grad_clip.clip import GradClip, GradClipConfig

__all__ = ["GradClip", "GradClipConfig"]
