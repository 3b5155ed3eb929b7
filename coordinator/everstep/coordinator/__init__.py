"""The cluster's daemon: who trains, who is parked, who is evicted, and from what to resume."""
