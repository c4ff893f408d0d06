"""Promise: what a tool server or a client wrote goes out again as the very text that came in."""

import json

import httpx
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.support.secrecy import secret
from tests.support.service import META, VERSION, CreatedTask, McpClient, Service, ToolServer
from tests.test_rawjson import json_documents, json_objects, json_strings, json_texts

on_one_service = settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # one broker for all examples
)

NASTY = (
    '{ "z":1.0,\n"a" : 1234567890123456789012345678901234567890 , "E":1E+5,"n":-0,\t'
    r'"nul":"\u0000","cut":"\ud83d","emoji":"\ud83d\ude00 😀","slash":"\/ \u002F /",'
    r'"z":[ ],"\u0063ontent":[{"type":"text","text":"naïve ☃ \"q\" \\ \b\f\n\r\t"} ],'
    '"x-unknown":{"deep":[[[{ }]],null,true]},"isError":false,'
    '"structuredContent":{"":"\x7f\u2028"}}'
)


# --- the tools of these tests --------------------------------------------------------------------


def member(document: str, *path: str) -> str:
    """The text of a member inside a JSON text, found without re-writing anything."""
    for name in path:
        document = _members(document)[name]
    return document


def _members(document: str) -> dict[str, str]:
    decoder = json.JSONDecoder(parse_int=str, parse_float=str)
    assert document[0] == "{"
    found, at = {}, _gap(document, 1)
    while document[at] != "}":
        name, at = decoder.raw_decode(document, at)
        start = _gap(document, _gap(document, at, ":"))
        _, at = decoder.raw_decode(document, start)
        found[name] = document[start:at]
        at = _gap(document, _gap(document, at, ","))
    return found


def _gap(document: str, at: int, mark: str = "") -> int:
    while document[at] in " \t\n\r":
        at += 1
    return at + 1 if mark and document[at] == mark else at


def body_of(response: httpx.Response, status: int = 200) -> str:
    assert response.status_code == status, response.text
    return response.content.decode()


async def create(tools: ToolServer, owner: McpClient, members: str = "") -> tuple[str, CreatedTask]:
    """Creates a task with members given as JSON text; the raw answer, and the task."""
    authorization = f'{{"authorization":"Bearer {owner.token}"}}'
    response = await tools.post_task(f'{{{members}"owner":{authorization}}}'.encode())
    made = body_of(response, 201)
    known = json.loads(made)
    return made, CreatedTask(known["taskRef"], secret(known["createTaskResult"]["taskId"]))


async def report(tools: ToolServer, task: CreatedTask, members: str) -> str:
    """Reports by a signed event with members given as JSON text; the raw answer."""
    body = f'{{"type":"task.updated","data":{{"taskRef":"{task.ref}",{members}}}}}'.encode()
    return body_of(await tools.post_event(body, tools.signed(body)))


async def call(client: McpClient, method: str, task: CreatedTask, members: str = "") -> str:
    """The raw result of a `tasks/*` request with more params given as JSON text."""
    params = f'{{{members}"taskId":"{task.id}","_meta":{json.dumps(META)}}}'
    body = f'{{"jsonrpc":"2.0","id":1,"method":"{method}","params":{params}}}'
    headers: dict[str, str | None] = {
        "mcp-protocol-version": VERSION,
        "mcp-method": method,
        "mcp-name": task.id,
    }
    return member(body_of(await client.post(body.encode(), headers)), "result")


def as_modern(result: str) -> str:
    """A result as the modern era shows it: only a `resultType` may be added at its front."""
    if "resultType" in json.loads(result, parse_int=str, parse_float=str):
        return result
    comma = "" if result[1:].strip() == "}" else ","
    return f'{{"resultType":"complete"{comma}{result[1:]}'


@pytest.fixture
async def tools(service: Service) -> ToolServer:
    """One backend, for all examples of a test."""
    return await service.tool_server()


# --- result -----------------------------------------------------------------------------------


async def _comes_back(service: Service, tools: ToolServer, result: str) -> None:
    client = service.client()
    state = f'"status":"completed","result":{result}'
    _, created_completed = await create(tools, client, f"{state},")
    _, told_later = await create(tools, client)
    await report(tools, told_later, state)

    for task in (created_completed, told_later):
        for _ in ("from the database", "from memory"):
            assert member(await call(client, "tasks/get", task), "result") == as_modern(result)
        assert member(body_of(await tools.read(task.ref)), "result") == result


async def test_a_result_of_every_oddity_comes_back_byte_for_byte(
    service: Service, tools: ToolServer
) -> None:
    await _comes_back(service, tools, NASTY)


@pytest.mark.parametrize(
    ("sent", "shown"),
    [
        ("{}", '{"resultType":"complete"}'),
        ("{ \n}", '{"resultType":"complete" \n}'),
        ('{ "a":1}', '{"resultType":"complete", "a":1}'),
        ('{"content":[]}', '{"resultType":"complete","content":[]}'),
        ('{"a":{"resultType":"x"}}', '{"resultType":"complete","a":{"resultType":"x"}}'),
        ('{"a":1, "resultType" : "complete"}', '{"a":1, "resultType" : "complete"}'),
        (r'{"resultTyp\u0065":"complete","a":1}', r'{"resultTyp\u0065":"complete","a":1}'),
        (r'{"a":"\ud83d","resultType":"complete"}', r'{"a":"\ud83d","resultType":"complete"}'),
        (r'{"\ud83d":"\ud83d"}', r'{"resultType":"complete","\ud83d":"\ud83d"}'),
    ],
)
async def test_only_a_missing_result_type_is_added_right_after_the_brace(
    service: Service, tools: ToolServer, sent: str, shown: str
) -> None:
    client = service.client()
    _, task = await create(tools, client, f'"status":"completed","result":{sent},')

    assert member(await call(client, "tasks/get", task), "result") == shown
    assert member(body_of(await tools.read(task.ref)), "result") == sent


@on_one_service
@given(result=json_documents())
async def test_any_result_comes_back_byte_for_byte(
    service: Service, tools: ToolServer, result: str
) -> None:
    await _comes_back(service, tools, result)


# --- error and status message --------------------------------------------------------------------


@st.composite
def _errors(draw: st.DrawFn) -> str:
    members = {
        "code": draw(st.integers(-(10**40), 10**40).map(str)),
        "message": draw(json_strings()),
        "data": draw(json_texts()),
        "x-more": draw(json_texts()),
    }
    order = draw(st.permutations(list(members)))
    space = draw(st.sampled_from(["", " ", "\n\t"]))
    written = ",".join(f'{space}"{name}"{space}:{members[name]}' for name in order)
    return f"{{{written}{space}}}"


@on_one_service
@given(error=_errors())
@example(error=r'{ "message":"\u0000\ud83d ☃\/","data":{"a":1.0,"a":-0} ,"code":-32000}')
async def test_an_error_comes_back_byte_for_byte(
    service: Service, tools: ToolServer, error: str
) -> None:
    client = service.client()
    state = f'"status":"failed","error":{error}'
    _, created_failed = await create(tools, client, f"{state},")
    _, told_later = await create(tools, client)
    await report(tools, told_later, state)

    for task in (created_failed, told_later):
        shown = await call(client, "tasks/get", task)
        assert member(shown, "error") == error
        assert member(shown, "statusMessage") == member(error, "message")
        assert member(body_of(await tools.read(task.ref)), "error") == error


@on_one_service
@given(message=json_strings())
@example(message=r'"\u0000 cut \ud83d, \/ ☃ \u00e9"')
@example(message='""')
async def test_a_status_message_comes_back_byte_for_byte(
    service: Service, tools: ToolServer, message: str
) -> None:
    client = service.client()
    made, task = await create(tools, client, f'"statusMessage":{message},')
    _, told_later = await create(tools, client)
    answer = await report(tools, told_later, f'"statusMessage":{message}')

    assert member(made, "createTaskResult", "statusMessage") == message
    assert member(made, "createTaskResultLegacy", "task", "statusMessage") == message
    assert member(answer, "task", "statusMessage") == message
    for told in (task, told_later):
        assert member(await call(client, "tasks/get", told), "statusMessage") == message
        assert member(body_of(await tools.read(told.ref)), "statusMessage") == message


# --- questions and answers -----------------------------------------------------------------------


@st.composite
def _requests(draw: st.DrawFn) -> str:
    """A question that MCP clients understand, with whatever else its author put there."""
    schema, more = draw(json_documents()), draw(json_texts())
    return draw(
        st.sampled_from([
            f'{{"method":"elicitation/create","params":{{"message":{draw(json_strings())},'
            f' "requestedSchema":{schema} ,"x":{more}}}}}',
            f'{{ "params":{schema},"x":{more},"method":"sampling/createMessage"}}',
            f'{{"x" : {more} , "method":"roots/list"}}',
        ])
    )  # fmt: skip


_keys = (
    json_strings(surrogates=False)
    .filter(lambda text: "\0" not in json.loads(text))
    .filter(lambda text: text != '""')
)


@on_one_service
@given(
    questions=st.lists(
        st.tuples(_keys, _requests()), min_size=1, max_size=3, unique_by=lambda q: json.loads(q[0])
    )
)
async def test_questions_come_back_byte_for_byte_and_in_order(
    service: Service, tools: ToolServer, questions: list[tuple[str, str]]
) -> None:
    client = service.client()
    asked = {json.loads(key): question for key, question in questions}
    requests = f"{{{','.join(f'{key}:{question}' for key, question in questions)}}}"
    state = f'"status":"input_required","inputRequests":{requests}'
    _, created_asking = await create(tools, client, f"{state},")
    _, asked_later = await create(tools, client)
    await report(tools, asked_later, state)

    for task in (created_asking, asked_later):
        shown = _members(member(await call(client, "tasks/get", task), "inputRequests"))
        assert list(shown.items()) == list(asked.items())
        read = body_of(await tools.read(task.ref))
        assert _members(member(read, "inputRequests")) == asked


@on_one_service
@given(
    answers=st.lists(
        st.tuples(_keys, json_documents()),
        min_size=1,
        max_size=3,
        unique_by=lambda answer: json.loads(answer[0]),
    ),
    unasked=json_objects(
        st.sampled_from([r'"\ud83d"', r'"\u0000"', '"never asked"']), st.just("{}")
    ),
)
@example(answers=[('"k"', NASTY)], unasked=r'{"\ud83d":{"\ud83d":"\u0000"}}')
async def test_the_backend_sees_answers_byte_for_byte(
    service: Service, tools: ToolServer, answers: list[tuple[str, str]], unasked: str
) -> None:
    client = service.client()
    requests = ",".join(f'{key}:{{"method":"roots/list"}}' for key, _ in answers)
    state = f'"status":"input_required","inputRequests":{{{requests}}}'
    _, task = await create(tools, client, f"{state},")
    more = "" if not unasked[1:-1].strip() else f"{unasked[1:-1]},"
    given = f"{{{more}{','.join(f'{key}:{text}' for key, text in answers)}}}"

    await call(client, "tasks/update", task, f'"inputResponses":{given},')

    expected = {json.loads(key): text for key, text in answers}
    seen_by_reading = member(body_of(await tools.read(task.ref)), "inputResponses")
    seen_by_reporting = member(await report(tools, task, '"pollIntervalMs":7'), "inputResponses")
    assert _members(seen_by_reading) == expected
    assert _members(seen_by_reporting) == expected


# --- JSON-RPC ids --------------------------------------------------------------------------------


async def _echoed(client: McpClient, rpc_id: str) -> None:
    discover = f'"method":"server/discover","params":{{"_meta":{json.dumps(META)}}}'
    found = _headers("server/discover")
    good = await client.post(f'{{"jsonrpc":"2.0","id":{rpc_id},{discover}}}'.encode(), found)
    wrong_version = await client.post(
        f'{{"id": {rpc_id} ,{discover},"jsonrpc":"1"}}'.encode(), found
    )
    no_method = await client.post(f'{{"jsonrpc":"2.0","id":\t{rpc_id}}}'.encode(), found)
    unknown = await client.post(
        f'{{"jsonrpc":"2.0","id":{rpc_id},{discover.replace("server/discover", "x")}}}'.encode(),
        _headers("x"),
    )

    for response, status in ((good, 200), (wrong_version, 400), (no_method, 400), (unknown, 404)):
        assert member(body_of(response, status), "id") == rpc_id


def _headers(method: str) -> dict[str, str | None]:
    return {"mcp-protocol-version": VERSION, "mcp-method": method}


@on_one_service
@given(rpc_id=json_strings() | st.integers(-(10**40), 10**40).map(str))
@example(rpc_id="0")
@example(rpc_id="-1")
@example(rpc_id="-0")
@example(rpc_id="1234567890123456789012345678901234567890")
@example(rpc_id='""')
@example(rpc_id=r'"a\u0000\ud83d\/☃\""')
@example(rpc_id='"7"')
async def test_an_id_is_echoed_with_its_type_and_digits(service: Service, rpc_id: str) -> None:
    await _echoed(service.client(), rpc_id)
