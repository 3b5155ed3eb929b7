"""The training loop, its snapshots, and `Session` for people with a loop of their own."""
