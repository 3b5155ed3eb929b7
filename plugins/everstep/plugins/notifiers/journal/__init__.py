"""Writes one line into the log when an incident opens and one when it closes."""

from everstep.plugins.notifiers.journal.notify import JournalNotifier

__all__ = ["JournalNotifier"]
