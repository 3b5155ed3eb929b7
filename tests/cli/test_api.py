from __future__ import annotations

import socket
from pathlib import Path

import pytest
from tests.cli.actors import Api as Server

from everstep.cli.api import DEFAULT_URL, Api, ApiError, ApiRefusedError
from everstep.cli.demo.ports import free_port
from everstep.sdk.config import ConfigError, ConfigFile


def written(folder: Path, text: str) -> ConfigFile:
    path = folder / "everstep.toml"
    path.write_text(text)
    return ConfigFile.load(path)


# ------------------------------------------------------------------- where it is and what to show


def test_an_option_wins_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    file = written(tmp_path, '[agent]\ncoordinators = ["file:1"]\ntoken = "file"\n')
    environ = {"EVERSTEP_COORDINATOR": "environ:2", "EVERSTEP_TOKEN": "environ"}
    by_option = Api.from_environ("option:3", "option", config=file, environ=environ)
    assert (by_option.url, by_option.token) == ("http://option:3", "option")
    by_environ = Api.from_environ(config=file, environ=environ)
    assert (by_environ.url, by_environ.token) == ("http://environ:2", "environ")
    by_file = Api.from_environ(config=file, environ={})
    assert (by_file.url, by_file.token) == ("http://file:1", "file")


def test_without_anything_it_is_the_one_on_this_machine() -> None:
    assert Api.from_environ(config=ConfigFile(), environ={}) == Api(DEFAULT_URL)


def test_the_files_token_is_not_shown_to_a_stranger(tmp_path: Path) -> None:
    file = written(tmp_path, '[agent]\ncoordinators = ["ws://head:1/v1/agent"]\ntoken = "secret"\n')
    assert Api.from_environ("elsewhere:1", config=file, environ={}).token == ""
    assert Api.from_environ("head:1", config=file, environ={}).token == "secret"


def test_a_coordinator_that_listens_everywhere_is_asked_on_this_machine(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    file = written(
        tmp_path, f'[coordinator]\nlisten = "0.0.0.0:7"\ntoken_file = "{tmp_path}/token"\n'
    )
    found = Api.from_environ(config=file, environ={})
    assert (found.url, found.token) == ("http://127.0.0.1:7", "secret")


def test_a_token_file_that_cannot_be_read_is_named_when_the_token_is_missing(
    api: Server, tmp_path: Path
) -> None:
    api.token = "secret"
    file = written(
        tmp_path, f'[agent]\ncoordinators = ["{api.url}"]\ntoken_file = "{tmp_path}/none"\n'
    )
    with pytest.raises(ApiRefusedError, match=r"a token is needed.*/none cannot be read: No such"):
        Api.from_environ(config=file, environ={}).get("nodes")


def test_what_is_wrong_elsewhere_in_the_file_is_no_matter_but_in_its_address_it_is(
    tmp_path: Path,
) -> None:
    file = written(tmp_path, '[agent]\nnod = 1\ncoordinators = ["head:1"]\n')
    assert Api.from_environ(config=file, environ={}).url == "http://head:1"
    with pytest.raises(ConfigError, match=r"everstep.toml: \[agent\].*coordinators"):
        Api.from_environ(config=written(tmp_path, "[agent]\ncoordinators = 5\n"), environ={})


@pytest.mark.parametrize("text", ["head:port", "ftp://head:1", "http://", "http://[::1", "a:0"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ApiRefusedError, match=r"is no coordinator.s address, e\.g\. http"):
        Api.from_environ(text, "t", environ={})


# ------------------------------------------------------------------------------- what comes back


def test_an_answer_is_handed_on_as_it_is(api: Server) -> None:
    api.token = "secret"
    api.says["GET /v1/incidents?job=a+b"] = 200, [{"id": 1}]
    api.says["POST /v1/nodes/n1/evict"] = 200, {}
    asked = Api(api.url, "secret")
    assert asked.get("incidents", job="a b", node=None) == [{"id": 1}]
    assert asked.post("nodes/n1/evict", reason="ä") == {}
    assert api.asked[-1].body.decode() == '{"reason": "\\u00e4"}'


@pytest.mark.parametrize("token", ["", "wrong"])
def test_a_token_that_is_missing_or_wrong_is_named(api: Server, token: str) -> None:
    api.token = "secret"
    with pytest.raises(ApiRefusedError, match="give it with --token or EVERSTEP_TOKEN") as caught:
        Api(api.url, token).get("nodes")
    assert caught.value.exit_code == 64
    assert "secret" not in str(caught.value)


def test_a_token_may_be_any_text_of_one_line(api: Server) -> None:
    api.token = "schlüssel".encode().decode("latin-1")  # as http.server reads a header
    api.says["GET /v1/nodes"] = 200, []
    assert Api(api.url, "schlüssel").get("nodes") == []
    with pytest.raises(ApiRefusedError, match="the token cannot be sent"):
        Api(api.url, "two\nlines").get("nodes")


@pytest.mark.parametrize("status", [400, 404, 409])
def test_a_refusal_is_told_in_the_coordinators_words(api: Server, status: int) -> None:
    api.says["POST /v1/nodes/n1/evict"] = status, {"error": "n1 is evicted already: lost"}
    with pytest.raises(ApiRefusedError, match=r"^n1 is evicted already: lost$") as caught:
        Api(api.url).post("nodes/n1/evict", reason="")
    assert caught.value.exit_code == 64


@pytest.mark.parametrize("body", [b'{"error": "disk full"}', b"oh dear", b""])
def test_a_coordinator_that_fails_is_no_fault_of_the_request(api: Server, body: bytes) -> None:
    api.says["GET /v1/nodes"] = 500, body
    with pytest.raises(ApiError, match=r"the coordinator failed \(HTTP 500.*see its log") as caught:
        Api(api.url).get("nodes")
    assert caught.value.exit_code == 69


@pytest.mark.parametrize("status", [200, 404])
def test_another_server_on_the_port_is_seen_for_what_it_is(api: Server, status: int) -> None:
    api.content_type = "text/html"
    api.says["GET /v1/nodes"] = status, b"<html>hello</html>"
    with pytest.raises(ApiError, match=rf"no everstep coordinator \(HTTP {status}, text/html\)"):
        Api(api.url).get("nodes")


def test_a_coordinator_that_hangs_is_left_after_a_while(api: Server) -> None:
    api.hangs = True
    with pytest.raises(ApiError, match=r"connected, but no answer within 0.3 s"):
        Api(api.url, timeout_s=0.3).get("nodes")


def test_who_hangs_up_without_an_answer_is_an_error_of_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as rude:
        rude.settimeout(10)
        url = f"http://127.0.0.1:{rude.getsockname()[1]}"
        import threading

        def hang_up() -> None:
            connection, _ = rude.accept()
            with connection:
                connection.recv(1024)

        thread = threading.Thread(target=hang_up)
        thread.start()
        with pytest.raises(ApiError, match="the connection broke"):
            Api(url).get("nodes")
        thread.join(10)


def test_where_nobody_listens_the_command_that_starts_one_is_named() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(ApiError, match=r"Connection refused.*`everstep coordinator`") as caught:
        Api(url).get("nodes")
    assert caught.value.exit_code == 69


def test_of_several_coordinators_the_first_that_listens_is_asked(api: Server) -> None:
    api.says["GET /v1/nodes"] = 200, []
    dead = f"http://127.0.0.1:{free_port()}"
    assert Api(dead, others=(api.url,)).get("nodes") == []
    with pytest.raises(ApiError, match=rf"{dead} .* or {dead} "):
        Api(dead, others=(dead,)).get("nodes")


def test_a_name_that_does_not_resolve_is_an_error_of_one_line() -> None:
    with pytest.raises(ApiError, match=r"no coordinator answers on http://nowhere\.invalid:1"):
        Api("http://nowhere.invalid:1").get("nodes")


def test_the_proxy_of_the_environment_gets_to_see_nothing(
    api: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
    api.says["GET /v1/nodes"] = 200, []
    assert Api(api.url).get("nodes") == []
