"""Snapshots on disk, and the process that puts them there. No torch: it must start at once."""
