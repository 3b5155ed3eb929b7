"""Names to addresses in a thread that never holds up an exit: DNS hangs when networks fail."""

from __future__ import annotations

import socket

from aiohttp.abc import AbstractResolver, ResolveResult

from everstep.sdk.guard import Failed, Guard


class Resolver(AbstractResolver):
    """The system's resolver, one question at a time, each with a deadline."""

    def __init__(self, *, timeout_s: float = 5.0) -> None:
        self._guard = Guard("resolver", timeout_s=timeout_s)

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Return the addresses of a host. Raises OSError with the reason."""
        outcome = await self._guard.call(
            lambda: socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)
        )
        if isinstance(outcome, Failed):
            raise OSError(None, f"{host}: {outcome.why}")
        return [
            ResolveResult(
                hostname=host,
                host=str(address[0]),
                port=int(address[1]),
                family=found,
                proto=proto,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for found, _, proto, _, address in outcome.value
        ]

    async def close(self) -> None:
        """Let the thread end."""
        self._guard.close()
