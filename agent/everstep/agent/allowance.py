"""How much somebody may say: a burst at once, and so many a second in the long run."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Allowance:
    """A bucket that holds `burst` and is refilled by `per_s`.

    >>> allowance = Allowance(now_s=0.0, burst=2, per_s=1)
    >>> allowance.spend(5, now_s=0.0), allowance.wait_s(), allowance.spend(0, now_s=4.0)
    (-3, 4.0, 1.0)
    """

    now_s: float
    burst: float
    per_s: float
    left: float = field(init=False)

    def __post_init__(self) -> None:
        self.left = float(self.burst)

    def spend(self, messages: int, *, now_s: float) -> float:
        """Take off some messages and return what is left, which may be less than nothing."""
        refilled = self.left + (now_s - self.now_s) * self.per_s
        self.left, self.now_s = min(self.burst, refilled) - messages, now_s
        return self.left

    def wait_s(self) -> float:
        """Return how long until there is one again."""
        return max(0.0, (1 - self.left) / self.per_s)
