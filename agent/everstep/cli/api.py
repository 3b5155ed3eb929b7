"""The coordinator's HTTP API, as the command line speaks it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import SplitResult, quote, urlencode, urlsplit

import msgspec

from everstep.cli.errors import VerbError, WrongRequestError
from everstep.sdk.config import ConfigError, ConfigFile

T = TypeVar("T", bound=msgspec.Struct)
DEFAULT_URL = "http://127.0.0.1:7070"

_MAX_BYTES = 256 * 1024 * 1024
_TOKEN_NEEDED = (401, 403)


class ApiError(VerbError):
    """The coordinator cannot be reached, or cannot answer; the text says what to do."""


class ApiRefusedError(ApiError, WrongRequestError):
    """The coordinator answers that it will not: the token, the name or the moment is wrong."""


class _UnreachedError(ApiError):
    """Nobody listens there; another address may do."""


@dataclass(frozen=True, slots=True)
class Api:
    """One coordinator. `token` is its join token, "" where it has none.

    `others` are tried in turn where nobody listens on `url`. `hint` is what to add where the
    token is not taken.
    """

    url: str = DEFAULT_URL
    token: str = ""
    timeout_s: float = 10.0
    others: tuple[str, ...] = ()
    hint: str = ""

    @classmethod
    def from_environ(
        cls,
        url: str | None = None,
        token: str | None = None,
        *,
        config: Path | ConfigFile | None = None,
        environ: Mapping[str, str] = os.environ,
    ) -> Api:
        """Return the one that options, environment and configuration name, in this order.

        `config` is a file, read or not; None means the usual one. Its token is shown to its own
        addresses only. Raises ConfigError and ApiRefusedError for what cannot be understood.
        """
        named = url or environ.get("EVERSTEP_COORDINATOR")
        given = token or environ.get("EVERSTEP_TOKEN", "")
        if named and given:
            return cls(_http(named), given)
        file = _configured(config)
        if named and _http(named) not in (file.url, *file.others):
            return cls(_http(named), given)
        found = file if named is None else replace(file, url=_http(named), others=())
        return replace(found, token=given) if given else found

    def get(self, path: str, **query: object) -> Any:
        """Return the JSON answer to GET /v1/`path`. Raises ApiError."""
        asked = {name: value for name, value in query.items() if value is not None}
        return self._ask("GET", f"{path}?{urlencode(asked)}" if asked else path, None)

    def post(self, path: str, **body: object) -> Any:
        """Return the JSON answer to POST /v1/`path`. Raises ApiError."""
        return self._ask("POST", path, json.dumps(body).encode())

    def _ask(self, method: str, path: str, body: bytes | None) -> Any:
        reasons = []
        for url in (self.url, *self.others):
            try:
                return self._ask_one(url, method, path, body)
            except _UnreachedError as exc:
                reasons.append(str(exc))
        raise ApiError(
            f"no coordinator answers on {' or '.join(reasons)}: start one with "
            "`everstep coordinator`, or name it with --coordinator or EVERSTEP_COORDINATOR"
            f"{self._hinted}"
        )

    def _ask_one(self, url: str, method: str, path: str, body: bytes | None) -> Any:
        headers: dict[str, str | bytes] = {"Content-Type": "application/json"}
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}".encode()
        place = urlsplit(url)
        connection = _connection(place, self.timeout_s)
        try:
            connection.connect()
        except (OSError, UnicodeError) as exc:
            connection.close()
            raise _UnreachedError(f"{url} ({getattr(exc, 'strerror', None) or exc})") from exc
        try:
            connection.request(method, f"{place.path}/v1/{path}", body, headers)
            answer = connection.getresponse()
            return self._judge(url, answer, answer.read(_MAX_BYTES))
        except TimeoutError as exc:
            raise ApiError(
                f"{url}: connected, but no answer within {self.timeout_s:g} s: the coordinator "
                "hangs or is overloaded; see its log"
            ) from exc
        except (OSError, HTTPException) as exc:
            raise ApiError(f"{url}: the connection broke ({exc!r}): ask again") from exc
        except ValueError as exc:
            raise ApiRefusedError(f"the token cannot be sent: {exc}") from exc
        finally:
            connection.close()

    def _judge(self, url: str, answer: HTTPResponse, body: bytes) -> Any:
        try:
            facts = json.loads(body)
        except ValueError:
            facts = None
        if answer.status < 300 and facts is not None:
            return facts
        error = facts.get("error") if isinstance(facts, dict) else None
        if answer.status in _TOKEN_NEEDED:
            raise ApiRefusedError(f"{url}: {self._about_the_token()}")
        if error is not None and answer.status < 500:
            raise ApiRefusedError(str(error))
        if answer.status >= 500:
            why = error or answer.reason
            raise ApiError(
                f"{url}: the coordinator failed (HTTP {answer.status}: {why}); see its log"
            )
        raise ApiError(
            f"{url}: what answers there is no everstep coordinator (HTTP {answer.status}, "
            f"{answer.headers.get_content_type()}): see --coordinator"
        )

    def _about_the_token(self) -> str:
        what = "its token is another one" if self.token else "a token is needed"
        return f"{what}: give it with --token or EVERSTEP_TOKEN{self._hinted}"

    @property
    def _hinted(self) -> str:
        return f" ({self.hint})" if self.hint else ""


def segment(name: str) -> str:
    """Return a name as one part of a path."""
    return quote(name, safe="")


# ------------------------------------------------------------------------- the configuration


class _Node(msgspec.Struct, frozen=True):
    """What the table of an agent tells about its coordinator."""

    coordinators: list[str] = []
    token: str = ""
    token_file: str | None = None


class _Head(msgspec.Struct, frozen=True):
    """What the table of a coordinator tells about itself."""

    listen: str = "127.0.0.1:7070"
    token: str = ""
    token_file: str | None = None


def _configured(config: Path | ConfigFile | None) -> Api:
    try:
        file = config if isinstance(config, ConfigFile) else ConfigFile.load(config)
    except ConfigError as exc:
        if config is not None:
            raise
        # The usual file may well be kept from ordinary users: it holds a token.
        return Api(hint=str(exc))
    node, head = _table(file, "agent", _Node), _table(file, "coordinator", _Head)
    urls = [*(node.coordinators if node else ()), *([_reachable(head.listen)] if head else ())]
    urls = list(dict.fromkeys(_http(one) for one in urls)) or [DEFAULT_URL]
    tokens = [_token(table) for table in (node, head) if table is not None]
    token = next((token for token, _ in tokens if token), "")
    hint = "" if token else next((why for _, why in tokens if why), "")
    return Api(urls[0], token, others=tuple(urls[1:]), hint=hint)


def _table(file: ConfigFile, name: str, type_: type[T]) -> T | None:
    if name not in file.tables:
        return None
    try:
        return msgspec.convert(file.tables[name], type_)
    except msgspec.ValidationError as exc:
        raise ConfigError(f"{file.where}: [{name}]: {exc}") from exc


def _token(table: _Node | _Head) -> tuple[str, str]:
    """Return the token, or why it cannot be had."""
    if table.token_file is None:
        return table.token, ""
    try:
        return Path(table.token_file).read_text(encoding="utf-8").strip(), ""
    except (OSError, UnicodeDecodeError) as exc:
        return "", f"{table.token_file} cannot be read: {getattr(exc, 'strerror', None) or exc}"


def _reachable(listen: str) -> str:
    """Return where to go for what listens on all addresses.

    >>> _reachable("0.0.0.0:7070"), _reachable("head:1")
    ('127.0.0.1:7070', 'head:1')
    """
    host, _, port = listen.rpartition(":")
    return f"127.0.0.1:{port}" if host in ("", "0.0.0.0", "::", "[::]") else listen


def _http(text: str) -> str:
    """Return the API's address for what a person wrote, WebSocket addresses included.

    >>> _http("head:7070"), _http("ws://head:7070/v1/agent"), _http("https://head/es/")
    ('http://head:7070', 'http://head:7070', 'https://head/es')
    """
    url = text if "://" in text else f"http://{text}"
    scheme, _, rest = url.partition("://")
    scheme = {"ws": "http", "wss": "https"}.get(scheme, scheme)
    url = f"{scheme}://{rest}".rstrip("/").removesuffix("/v1/agent")
    try:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return url
    except ValueError:
        pass  # a port that is no number, a bracket left open
    raise ApiRefusedError(f"{text!r} is no coordinator's address, e.g. {DEFAULT_URL}")


def _connection(place: SplitResult, timeout_s: float) -> HTTPConnection:
    # No proxy of the environment and no redirection: the token goes where it was meant to.
    make = HTTPSConnection if place.scheme == "https" else HTTPConnection
    return make(place.hostname or "", place.port, timeout=timeout_s)
