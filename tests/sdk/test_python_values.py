"""The Python SDK without a broker: what it sends, says and refuses."""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

import taskbroker_sdk
from taskbroker_sdk import (
    AsyncTaskBroker,
    BrokerError,
    NewTask,
    Problem,
    TaskBroker,
    TaskFailed,
    Unreachable,
    current_task,
    elicitation,
    owner_from,
    sign,
    text_result,
)
from taskbroker_sdk._retry import LONGEST_PAUSE, LONGEST_RETRY_AFTER, exchange, pause_after
from taskbroker_sdk._wire import PROBLEMS, Answer, Request
from tests.support.secrecy import new_token, secret

KEY = secret("tbk_" + "k3y_" * 10)
SECRET = secret("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
ENVIRONMENT = {
    "BROKER_URL": "http://127.0.0.1:8080/",
    "BROKER_BACKEND": "my-tools",
    "BROKER_API_KEY": KEY,
    "BROKER_WEBHOOK_SECRET": SECRET,
}
CLIENTS: list[type[TaskBroker] | type[AsyncTaskBroker]] = [TaskBroker, AsyncTaskBroker]


def refusal(status: int) -> httpx.Response:
    """As a broker refuses."""
    return httpx.Response(status, json={"type": f"{PROBLEMS}refused", "title": "No"})


def test_the_published_example_of_standard_webhooks_is_signed() -> None:
    signature = sign(SECRET, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}')
    assert signature == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


@pytest.mark.parametrize(
    "text",
    [
        "",
        "whsec_",
        SECRET.removeprefix("whsec_"),
        "whsec_hushhush1",
        "whsec_hush!",
        "whsec_hushä",
        "tbk_hush",
    ],
)
def test_what_is_no_secret_is_not_signed_with_and_not_quoted(text: str) -> None:
    with pytest.raises(ValueError, match="a webhook secret is whsec_ and base64") as refusal:
        sign(text, "msg_1", 0, b"")
    assert "hush" not in str(refusal.value)


# --- owner_from ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "owner"),
    [
        ({"Authorization": "Bearer a"}, {"authorization": "Bearer a"}),
        ({"authorization": "Bearer a", "task-owner": "h"}, {"handle": "h"}),
        (httpx.Headers({"TASK-OWNER": "h"}), {"handle": "h"}),
        ({"Cookie": "x"}, {"anonymous": True}),
        ({"task-owner": "", "authorization": ""}, {"anonymous": True}),
        ({}, {"anonymous": True}),
    ],
)
def test_the_owner_comes_from_the_headers_of_the_call(
    headers: Mapping[str, str], owner: dict[str, Any]
) -> None:
    assert owner_from(headers) == owner


@st.composite
def spellings(draw: st.DrawFn, name: str) -> str:
    """A header's name in any mixture of capitals."""
    return "".join(draw(st.sampled_from([c.lower(), c.upper()])) for c in name)


@given(
    spellings("task-owner"),
    spellings("authorization"),
    st.dictionaries(st.text(), st.text()),
    st.booleans(),
)
def test_a_handle_counts_before_a_credential_in_any_spelling_and_company(
    handle: str, credential: str, others: dict[str, str], has_handle: bool
) -> None:
    names = {"task-owner", "authorization"}
    others = {name: value for name, value in others.items() if name.lower() not in names}
    headers = {**others, credential: "Bearer a", **({handle: "h"} if has_handle else {})}
    assert owner_from(headers) == ({"handle": "h"} if has_handle else {"authorization": "Bearer a"})
    assert owner_from(others) == {"anonymous": True}


# --- when to try again ---------------------------------------------------------------------------

LUCK = st.floats(0, 1)


@given(st.integers(1, 10**6), LUCK)
def test_pauses_grow_from_a_fifth_of_a_second_to_ten(failures: int, luck: float) -> None:
    ceiling = pause_after(failures, 1)
    assert ceiling / 2 <= pause_after(failures, luck) <= ceiling <= LONGEST_PAUSE
    assert pause_after(failures + 1, luck) >= pause_after(failures, luck)
    assert pause_after(1, 1) == 0.2
    assert pause_after(7, 1) == LONGEST_PAUSE


@given(st.integers(1, 100), LUCK, st.floats(0, 10**9))
def test_a_server_that_asks_for_more_time_gets_it_within_reason(
    failures: int, luck: float, asked: float
) -> None:
    pause = pause_after(failures, luck, asked)
    assert pause >= min(asked, LONGEST_RETRY_AFTER)
    assert pause in (pause_after(failures, luck), asked, LONGEST_RETRY_AFTER)


@pytest.mark.parametrize(
    ("header", "least", "most"),
    [
        (None, 0.1, 0.2),
        ("7", 7, 7),
        ("86400", LONGEST_RETRY_AFTER, LONGEST_RETRY_AFTER),
        ("Wed, 21 Oct 2026 07:28:00 GMT", 0.1, 0.2),
        ("-1", 0.1, 0.2),
    ],
)
def test_the_second_attempt_waits_as_long_as_the_answer_asks(
    header: str | None, least: float, most: float
) -> None:
    talk = exchange(Request("GET", "/v1/tasks"), dict, attempts=2)
    first = next(talk)
    second = talk.send(Answer(503, b"", retry_after=header))
    assert first.after == 0
    assert second.request is first.request
    assert least <= second.after <= most


# --- clients -------------------------------------------------------------------------------------


@pytest.mark.parametrize("client", CLIENTS)
def test_the_environment_makes_a_client_that_never_shows_its_keys(
    client: type[TaskBroker] | type[AsyncTaskBroker],
) -> None:
    broker = client.from_env(ENVIRONMENT, attempts=3)
    assert repr(broker) == f"{client.__name__}('http://127.0.0.1:8080', 'my-tools')"
    seen = " ".join(map(repr, vars(broker).values())) + str(broker.task("0193"))
    assert "my-tools" in seen
    assert KEY not in seen
    assert SECRET not in seen


@pytest.mark.parametrize("client", CLIENTS)
def test_what_is_missing_in_the_environment_is_named(
    client: type[TaskBroker] | type[AsyncTaskBroker],
) -> None:
    with pytest.raises(ValueError, match=r"^not set: BROKER_URL, BROKER_API_KEY"):
        client.from_env({"BROKER_BACKEND": "my-tools", "BROKER_API_KEY": ""})
    unsigned = {**ENVIRONMENT, "BROKER_WEBHOOK_SECRET": ""}
    assert "my-tools" in repr(client.from_env(unsigned))


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"url": "127.0.0.1:8080"}, "url must look like"),
        ({"url": "http://broker.example:65536"}, "url must look like"),
        ({"url": "http://broker.example/#there"}, "no fragment"),
        ({"url": "https://user:pass@broker.example"}, "no user name"),
        ({"backend": ""}, "backend is empty"),
        ({"api_key": f"{KEY}\n"}, "a line break"),
        ({"webhook_secret": KEY}, "a webhook secret is"),
        ({"webhook_secret": SECRET.removeprefix("whsec_")}, "a webhook secret is"),
        ({"attempts": 0}, "attempts"),
        ({"heartbeat": 0}, "heartbeat"),
    ],
)
def test_what_cannot_be_right_is_refused_at_once(wrong: dict[str, Any], complaint: str) -> None:
    right = {"url": "http://broker", "backend": "my-tools", "api_key": KEY}
    with pytest.raises(ValueError, match=complaint) as refusal:
        TaskBroker(**{**right, **wrong})
    assert KEY not in str(refusal.value)


@pytest.mark.parametrize(
    "call",
    [
        lambda broker, owner: broker.create(owner, status="completed", result={"x": float("nan")}),
        lambda broker, owner: broker.create(owner, status_message="\ud800"),
        lambda broker, _: broker.task("0193").complete({"x": object()}),
    ],
)
def test_what_is_not_json_is_refused_before_it_is_sent(
    call: Callable[[TaskBroker, dict[str, Any]], object],
) -> None:
    token = new_token()
    with (
        TaskBroker("http://127.0.0.1:9", "my-tools", KEY, attempts=1) as broker,
        pytest.raises(ValueError, match="cannot be sent as JSON") as refusal,
    ):
        call(broker, {"authorization": f"Bearer {token}"})
    assert token not in str(refusal.value)


def test_an_argument_that_does_not_exist_is_an_error() -> None:
    with (
        TaskBroker("http://127.0.0.1:9", "my-tools", KEY, attempts=1) as broker,
        pytest.raises(TypeError, match=r"no such argument: ttl$"),
    ):
        broker.create({"anonymous": True}, ttl=5)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (httpx.Response(200, html="<h1>Welcome</h1>"), "200 OK"),
        (httpx.Response(200, json=["no object"]), "200 OK"),
        (httpx.Response(200, json={"status": "ok"}), "200 OK"),
        (httpx.Response(404, html="<h1>404</h1>"), "404 Not Found"),
        (httpx.Response(404, json={"type": "about:blank", "title": "No page"}), "404 Not Found"),
        (httpx.Response(410, json={"type": 410}), "410 Gone"),
        (httpx.Response(401, json=["log in"]), "401 Unauthorized"),
        (httpx.Response(301, headers={"location": "/"}), "301 Moved Permanently"),
        (httpx.Response(599), "599"),
    ],
)
def test_a_server_that_is_no_broker_is_recognised_and_asked_again(
    answer: httpx.Response, status: str
) -> None:
    asked: list[httpx.Request] = []

    def elsewhere(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return answer

    with (
        httpx.Client(transport=httpx.MockTransport(elsewhere)) as http,
        TaskBroker("http://shop.example", "my-tools", KEY, attempts=2, http=http) as broker,
        pytest.raises(Unreachable) as failure,
    ):
        broker.task("0193").read()
    said = f"in 2 attempts; the last one: {status}, not a broker's answer; is the URL right?"
    assert said in str(failure.value)
    assert len(asked) == 2


RESULTS = {"createTaskResult": {"status": "working"}, "createTaskResultLegacy": {}}


@pytest.mark.parametrize(
    "body",
    [
        json.dumps({"taskRef": "0193"}),
        json.dumps({**RESULTS, "taskRef": 193}),
        json.dumps({**RESULTS, "taskRef": "0193", "createTaskResult": None}),
        json.dumps({**RESULTS, "taskRef": "0193", "createTaskResult": {"taskId": "an-id"}}),
        json.dumps({**RESULTS, "taskRef": "0193", "createTaskResult": {"status": ["working"]}}),
        json.dumps({**RESULTS, "taskRef": "0193", "createTaskResultLegacy": None}),
        '{"task":' * 100_000,
    ],
    ids=["no results", "ref", "null", "no status", "status", "legacy", "deep"],
)
def test_a_creation_that_no_broker_answers_so_is_not_believed(body: str) -> None:
    answer = httpx.Response(201, text=body)
    with (
        httpx.Client(transport=httpx.MockTransport(lambda _: answer)) as http,
        TaskBroker("http://shop.example", "my-tools", KEY, attempts=1, http=http) as broker,
        pytest.raises(BrokerError, match="201 Created, not a broker's answer; is the URL right"),
    ):
        broker.start({"anonymous": True}, lambda _: text_result("never"))


@pytest.mark.parametrize(
    "said",
    [
        {"taskRef": ["0193"]},
        {"status": ["working"]},
        {"inputResponses": None},
        {"cancelRequested": "no"},
    ],
)
def test_a_task_that_no_broker_describes_so_is_not_believed(said: dict[str, Any]) -> None:
    right: dict[str, Any] = {
        "taskRef": "0193",
        "status": "working",
        "createdAt": "2026-11-30T09:00:00Z",
        "lastUpdatedAt": "2026-11-30T09:00:00Z",
        "ttlMs": None,
        "cancelRequested": False,
        "inputResponses": {},
    }
    answers = [httpx.Response(200, json=right), httpx.Response(200, json={**right, **said})]
    with (
        httpx.Client(transport=httpx.MockTransport(lambda _: answers.pop(0))) as http,
        TaskBroker("http://shop.example", "my-tools", KEY, attempts=1, http=http) as broker,
    ):
        assert broker.task("0193").read().status == "working"
        with pytest.raises(BrokerError, match="200 OK, not a broker's answer"):
            broker.task("0193").read()


def test_an_external_id_is_made_up_only_where_none_is_given() -> None:
    sent: list[Any] = []

    def broker_says_no(request: httpx.Request) -> httpx.Response:
        sent.append(json.loads(request.content).get("externalId"))
        return refusal(422)

    with (
        httpx.Client(transport=httpx.MockTransport(broker_says_no)) as http,
        TaskBroker("http://broker.example", "my-tools", KEY, http=http) as broker,
    ):
        given: list[NewTask] = [{}, {}, {"external_id": ""}, {"external_id": "job-81"}]
        for names in given:
            with pytest.raises(Problem):
                broker.create({"anonymous": True}, **names)

    assert sent[2:] == ["", "job-81"]  # that a name is empty is for the broker to refuse
    assert sent[0] != sent[1]
    assert min(map(len, sent[:2])) > 0


def test_requests_say_who_sends_them() -> None:
    said: list[str] = []

    def note(request: httpx.Request) -> httpx.Response:
        said.append(request.headers["user-agent"])
        return refusal(404)

    with (
        httpx.Client(transport=httpx.MockTransport(note)) as http,
        TaskBroker("http://broker.example", "my-tools", KEY, http=http) as broker,
        pytest.raises(Problem),
    ):
        broker.task("0193").read()
    assert said == [f"taskbroker-sdk-python/{version('taskbroker-sdk')}"]


# --- small things --------------------------------------------------------------------------------


def test_a_problem_says_what_is_wrong_and_where() -> None:
    document = {
        "title": "The input does not fit",
        "detail": "Unknown status.",
        "errors": [{"pointer": "/data/status", "detail": "must be one of …"}],
    }
    problem = Problem(422, document)
    assert str(problem) == (
        "The input does not fit: Unknown status. [/data/status: must be one of …]"
    )
    assert problem.errors[0].pointer == "/data/status"
    assert str(Problem(418, {})) == "HTTP status 418"


def test_shapes_of_mcp() -> None:
    assert text_result("done") == {"content": [{"type": "text", "text": "done"}]}
    assert text_result("no", is_error=True)["isError"] is True
    question = elicitation("Sure?", {"type": "object"})
    assert question["method"] == "elicitation/create"
    assert question["params"]["requestedSchema"] == {"type": "object"}
    assert str(TaskFailed(-32000, "no disk")) == "no disk (-32000)"


def test_there_is_no_current_task_outside_of_work() -> None:
    with pytest.raises(LookupError, match="no work"):
        current_task()


def test_the_package_needs_nothing_of_the_server() -> None:
    program = "import sys, taskbroker_sdk; print(*{name.split('.')[0] for name in sys.modules})"
    loaded = subprocess.check_output([sys.executable, "-c", program], text=True).split()
    assert "httpx" in loaded
    assert not {"app", "fastapi", "sqlalchemy", "msgspec", "pydantic"} & set(loaded)


def test_everything_public_is_there() -> None:
    assert all(hasattr(taskbroker_sdk, name) for name in taskbroker_sdk.__all__)
    assert taskbroker_sdk.__all__ == sorted(taskbroker_sdk.__all__)
