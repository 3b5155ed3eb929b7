"""What crosses a process boundary: messages, framing and the progress page.

Agent, coordinator, launcher and ranks all speak these types and none of them owns them.
"""
