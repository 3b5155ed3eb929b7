"""The node's daemon: reads health and progress, exports them, relays what is decided."""
