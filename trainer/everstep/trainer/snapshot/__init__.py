"""Snapshots: copied out in one go, written in the background, believed only when verified."""
