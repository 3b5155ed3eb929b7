"""Snapshots: copied while training goes on, written by another process, believed when verified."""
