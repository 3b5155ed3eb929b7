"""The coordinator's HTTP API, as the command line speaks it."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from everstep.sdk.errors import EverstepError

DEFAULT_URL = "http://127.0.0.1:7070"


class ApiError(EverstepError):
    """The coordinator cannot be reached, or refuses; the text says which and what to do."""


@dataclass(frozen=True, slots=True)
class Api:
    """One coordinator. `token` is its join token, "" where it has none."""

    url: str = DEFAULT_URL
    token: str = ""
    timeout_s: float = 10.0

    @classmethod
    def from_environ(cls, url: str | None, token: str | None) -> Api:
        """Return the one that options or EVERSTEP_COORDINATOR and EVERSTEP_TOKEN name."""
        named = url or os.environ.get("EVERSTEP_COORDINATOR") or DEFAULT_URL
        if "://" not in named:
            named = f"http://{named}"
        return cls(named.rstrip("/"), token or os.environ.get("EVERSTEP_TOKEN", ""))

    def get(self, path: str) -> Any:
        """Return the JSON answer to GET /v1/`path`. Raises ApiError."""
        return self._ask("GET", path, None)

    def post(self, path: str, **body: object) -> Any:
        """Return the JSON answer to POST /v1/`path`. Raises ApiError."""
        return self._ask("POST", path, json.dumps(body).encode())

    def _ask(self, method: str, path: str, body: bytes | None) -> Any:
        request = urllib.request.Request(f"{self.url}/v1/{path}", data=body, method=method)
        request.add_header("Content-Type", "application/json")
        if self.token:
            request.add_header("Authorization", f"Bearer {self.token}")
        try:
            with urllib.request.urlopen(request, timeout=self.timeout_s) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as exc:
            raise ApiError(f"{self.url}: {_reason(exc)}") from exc
        except (OSError, ValueError) as exc:
            why = getattr(exc, "reason", exc)
            raise ApiError(
                f"no coordinator answers on {self.url} ({why}): start one with "
                "`everstep coordinator`, or name it with --coordinator or EVERSTEP_COORDINATOR"
            ) from exc


def _reason(error: urllib.error.HTTPError) -> str:
    if error.code == 401:
        return "a token is needed: give it with --token or EVERSTEP_TOKEN"
    try:
        return str(json.load(error)["error"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {error.code} {error.reason}"
