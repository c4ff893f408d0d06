"""How a tool server reports: `POST /v1/webhooks/{backend}`, the whole table of outcomes."""

import asyncio
import json
from datetime import timedelta
from typing import Any

import pytest

from app.domain.clock import iso
from tests.support.service import ELICITATION, CreatedTask, McpClient, Service, ToolServer


@pytest.fixture
async def tools(service: Service) -> ToolServer:
    return await service.tool_server()


@pytest.fixture
def client(service: Service) -> McpClient:
    return service.client()


@pytest.fixture
async def task(tools: ToolServer, client: McpClient) -> CreatedTask:
    return await tools.create(client, externalId="job-7", tool="resize")


# --- applied ----------------------------------------------------------------------------------


async def test_an_applied_event_answers_with_the_state_and_with_what_the_backend_must_learn(
    service: Service, tools: ToolServer, task: CreatedTask
) -> None:
    response = await tools.report(task, statusMessage="10 %", pollIntervalMs=99, ttlMs=120_000)

    assert response.status_code == 200
    answer = response.json()
    assert answer["applied"] is True
    assert "reason" not in answer
    assert (answer["cancelRequested"], answer["inputResponses"]) == (False, {})
    shown = answer["task"]
    assert {**shown, "createdAt": "", "lastUpdatedAt": ""} == {
        "taskRef": task.ref,
        "externalId": "job-7",
        "tool": "resize",
        "status": "working",
        "statusMessage": "10 %",
        "createdAt": "",
        "lastUpdatedAt": "",
        "ttlMs": 120_000,
        "pollIntervalMs": 99,
    }
    assert task.id not in response.text


async def test_the_reply_carries_the_wish_to_cancel_and_every_answer(
    tools: ToolServer, client: McpClient, task: CreatedTask
) -> None:
    await tools.ask(task, "a", "b")
    await client.update(task.id, {"a": {"action": "accept", "content": {"n": 1}}})
    await client.cancel(task.id)

    answer = (await tools.report(task, statusMessage="…")).json()

    assert answer["cancelRequested"] is True
    assert answer["inputResponses"] == {"a": {"action": "accept", "content": {"n": 1}}}


@pytest.mark.parametrize("name", ["taskRef", "externalId", "taskId"])
async def test_an_event_names_its_task_in_any_of_three_ways(
    tools: ToolServer, task: CreatedTask, name: str
) -> None:
    names = {"taskRef": task.ref, "externalId": "job-7", "taskId": task.id}
    body = tools.event({name: names[name], "statusMessage": "named"})
    answer = (await tools.post_event(body, tools.signed(body))).json()
    assert (answer["applied"], answer["task"]["taskRef"]) == (True, task.ref)


async def test_the_api_key_will_do_for_senders_that_cannot_sign(
    tools: ToolServer, task: CreatedTask
) -> None:
    body = tools.event({"taskRef": task.ref, "statusMessage": "unsigned"})
    headers = {**tools.authorization, "webhook-id": "evt-1"}
    assert (await tools.post_event(body, headers)).json()["applied"] is True
    assert (await tools.post_event(body, headers)).json()["reason"] == "duplicate"


async def test_new_questions_add_to_those_still_open(
    tools: ToolServer, client: McpClient, task: CreatedTask
) -> None:
    await tools.ask(task, "a")
    await tools.ask(task, "b")
    assert list((await client.get(task.id))["inputRequests"]) == ["a", "b"]


async def test_a_message_does_not_outlive_the_status_that_it_described(
    tools: ToolServer, client: McpClient, task: CreatedTask
) -> None:
    await tools.report(task, statusMessage="90 %")
    await tools.complete(task)
    assert "statusMessage" not in await client.get(task.id)


async def test_a_ttl_in_an_event_counts_from_the_creation(
    service: Service, tools: ToolServer, client: McpClient, task: CreatedTask
) -> None:
    service.clock.advance(seconds=10)
    await tools.report(task, ttlMs=15_000)
    service.clock.advance(seconds=5)
    assert "expired" in (await client.error("tasks/get", task.id))["message"]


# --- answered with 200, and not applied -------------------------------------------------------


async def test_the_same_webhook_id_is_applied_once(
    tools: ToolServer, client: McpClient, task: CreatedTask
) -> None:
    await tools.report(task, webhook_id="msg_1", statusMessage="first")
    again = (await tools.report(task, webhook_id="msg_1", statusMessage="second")).json()
    assert (again["applied"], again["reason"]) == (False, "duplicate")
    assert (await client.get(task.id))["statusMessage"] == "first"


async def test_a_repeated_event_still_learns_what_its_lost_reply_said(
    tools: ToolServer, client: McpClient, task: CreatedTask
) -> None:
    await tools.report(task, webhook_id="msg_1", statusMessage="first")
    await client.cancel(task.id)
    again = (await tools.report(task, webhook_id="msg_1", statusMessage="first")).json()
    assert again["cancelRequested"] is True


async def test_a_webhook_id_is_remembered_for_a_day(
    service: Service, tools: ToolServer, client: McpClient
) -> None:
    task = await tools.create(client, ttlMs=7 * 24 * 3600 * 1000)
    await tools.report(task, webhook_id="msg_1", statusMessage="first")
    service.clock.advance(seconds=24 * 3600)
    await service.sweep()
    again = await tools.report(task, webhook_id="msg_1", statusMessage="second")
    assert again.json()["reason"] == "duplicate"
    service.clock.advance(seconds=2 * 3600)
    assert (await service.sweep()).events_forgotten == 1


async def test_another_backend_may_use_the_same_webhook_id(
    service: Service, tools: ToolServer, client: McpClient, task: CreatedTask
) -> None:
    other = await service.tool_server("other")
    theirs = await other.create(client)
    await tools.report(task, webhook_id="msg_1", statusMessage="x")
    assert (await other.report(theirs, webhook_id="msg_1", statusMessage="y")).json()["applied"]


@pytest.mark.parametrize(
    "late",
    [
        {"statusMessage": "late"},
        {"status": "failed", "error": {"code": 1, "message": "late"}},
        {"status": "cancelled"},
        {"status": "working"},
        {"status": "input_required", "inputRequests": {"q": ELICITATION}},
    ],
)
async def test_a_terminal_task_never_changes(
    tools: ToolServer, client: McpClient, task: CreatedTask, late: dict[str, Any]
) -> None:
    await tools.complete(task, {"content": [], "n": 1})
    before = await client.get(task.id)
    answer = (await tools.report(task, **late)).json()
    assert (answer["applied"], answer["reason"]) == (False, "terminal")
    assert await client.get(task.id) == before


async def test_progress_that_was_overtaken_is_stale(
    service: Service, tools: ToolServer, client: McpClient, task: CreatedTask
) -> None:
    now = service.clock()
    await tools.report(task, sent_at=iso(now), statusMessage="50 %")
    before = iso(now - timedelta(seconds=2))
    for late in ({"statusMessage": "40 %"}, {"status": "working", "statusMessage": "40 %"}):
        answer = (await tools.report(task, sent_at=before, **late)).json()
        assert (answer["applied"], answer["reason"]) == (False, "stale")
    assert (await client.get(task.id))["statusMessage"] == "50 %"

    same_moment = await tools.report(task, sent_at=iso(now), statusMessage="50.1 %")
    assert same_moment.json()["applied"] is True


@pytest.mark.parametrize(
    "outcome",
    [
        {"status": "completed", "result": {}},
        {"status": "failed", "error": {"code": 1, "message": ""}},
        {"status": "cancelled"},
        {"status": "input_required", "inputRequests": {"q": ELICITATION}},
    ],
)
async def test_outcomes_are_never_stale(
    service: Service, tools: ToolServer, task: CreatedTask, outcome: dict[str, Any]
) -> None:
    await tools.report(task, statusMessage="newest")
    earlier = iso(service.clock() - timedelta(seconds=60))
    answer = (await tools.report(task, sent_at=earlier, **outcome)).json()
    assert (answer["applied"], answer["task"]["status"]) == (True, outcome["status"])


async def test_an_event_without_a_time_is_taken_as_it_comes(
    tools: ToolServer, task: CreatedTask
) -> None:
    await tools.report(task, statusMessage="newest")
    body = json.dumps(
        {"type": "task.updated", "data": {"taskRef": task.ref, "statusMessage": "x"}}
    ).encode()
    assert (await tools.post_event(body, tools.signed(body))).json()["applied"] is True


# --- refused ----------------------------------------------------------------------------------


async def test_a_key_is_never_used_twice_on_a_task(
    tools: ToolServer, client: McpClient, task: CreatedTask
) -> None:
    await tools.ask(task, "a")
    await client.update(task.id, {"a": {}})
    for moment in ("answered", "withdrawn"):
        response = await tools.ask(task, "a", moment)
        assert response.status_code == 422, moment
        assert response.json()["errors"] == [
            {
                "pointer": "/data/inputRequests/a",
                "detail": "this key was already used on this task",
            }
        ]
        await tools.report(task, status="working")
    assert (await client.get(task.id))["status"] == "working"


@pytest.mark.parametrize(
    ("data", "status", "pointer"),
    [
        ({"status": "completed"}, 422, "/data/result"),
        ({"result": {}}, 422, "/data/result"),
        ({"status": "working", "result": {}}, 422, "/data/result"),
        ({"result": {}, "status": "working"}, 422, "/data/result"),
        ({"error": {"code": 1, "message": ""}, "status": "working"}, 422, "/data/error"),
        ({"status": "failed"}, 422, "/data/error"),
        ({"status": "input_required"}, 422, "/data/inputRequests"),
        ({"status": "paused"}, 422, "/data/status"),
        ({"status": None}, 400, "/data/status"),
        ({"statusMessage": 5}, 400, "/data/statusMessage"),
        ({"pollIntervalMs": "5"}, 400, "/data/pollIntervalMs"),
        ({"ttlMs": -1}, 422, "/data/ttlMs"),
        ({"taskRef": 5}, 400, "/data/taskRef"),
    ],
)  # fmt: skip
async def test_what_does_not_fit_is_refused_with_its_place_and_changes_nothing(
    tools: ToolServer,
    client: McpClient,
    task: CreatedTask,
    data: dict[str, Any],
    status: int,
    pointer: str,
) -> None:
    before = await client.get(task.id)
    body = tools.event({"taskRef": task.ref, **data})
    response = await tools.post_event(body, tools.signed(body, webhook_id="msg_bad"))

    assert (response.status_code, response.headers["content-type"]) == (
        status,
        "application/problem+json",
    )
    assert response.json()["errors"][0]["pointer"] == pointer
    assert await client.get(task.id) == before
    good = await tools.report(task, webhook_id="msg_bad", statusMessage="mended")
    assert good.json()["applied"] is True  # a refused event does not use its id up


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'"text"', b"{}", b"\xff", b'{"type":"task.updated"}',
     b'{"type":7,"data":{}}', b'{"type":"task.updated","data":[]}',
     b'{"type":"task.updated","data":{}}',
     b'{"type":"task.updated","timestamp":"yesterday","data":{"externalId":"job-7"}}',
     b'{"type":"task.updated","timestamp":"2026-11-30T09:00:00","data":{"externalId":"job-7"}}'],
)  # fmt: skip
async def test_what_is_no_event_is_a_bad_request(
    tools: ToolServer, task: CreatedTask, body: bytes
) -> None:
    response = await tools.post_event(body, tools.signed(body))
    assert response.status_code == 400
    assert response.json()["detail"]


async def test_an_event_of_another_type_is_refused(tools: ToolServer, task: CreatedTask) -> None:
    body = json.dumps({"type": "task.created", "data": {"taskRef": task.ref}}).encode()
    assert (await tools.post_event(body, tools.signed(body))).status_code == 422


async def test_an_event_from_the_future_is_refused(
    service: Service, tools: ToolServer, task: CreatedTask
) -> None:
    future = iso(service.clock() + timedelta(minutes=10))
    response = await tools.report(task, sent_at=future, statusMessage="x")
    assert response.status_code == 422
    assert "clock" in response.json()["detail"]


async def test_names_of_different_tasks_do_not_go_together(
    tools: ToolServer, client: McpClient, task: CreatedTask
) -> None:
    other = await tools.create(client, externalId="job-8")
    for names in (
        {"taskRef": task.ref, "externalId": "job-8"},
        {"taskRef": task.ref, "taskId": other.id},
        {"taskId": task.id, "externalId": "job-8"},
    ):
        body = tools.event({**names, "statusMessage": "x"})
        assert (await tools.post_event(body, tools.signed(body))).status_code == 422


@pytest.mark.parametrize(
    "name",
    [
        {"taskRef": "00000000-0000-7000-8000-000000000000"},
        {"taskRef": "no uuid"},
        {"externalId": "unheard of"},
        {"taskId": "A" * 64},
        {"taskId": "short"},
    ],
)
async def test_an_unknown_task_is_not_found(tools: ToolServer, name: dict[str, str]) -> None:
    body = tools.event({**name, "statusMessage": "x"})
    assert (await tools.post_event(body, tools.signed(body))).status_code == 404


async def test_a_task_of_another_backend_is_not_found(service: Service, task: CreatedTask) -> None:
    other = await service.tool_server("other")
    for name in ({"taskRef": task.ref}, {"taskId": task.id}, {"externalId": "job-7"}):
        body = other.event({**name, "statusMessage": "x"})
        assert (await other.post_event(body, other.signed(body))).status_code == 404


async def test_an_expired_task_is_gone(
    service: Service, tools: ToolServer, client: McpClient
) -> None:
    task = await tools.create(client, ttlMs=1_000)
    service.clock.advance(milliseconds=1_000)
    assert (await tools.report(task, statusMessage="x")).status_code == 410
    assert (await tools.read(task.ref)).status_code == 410


async def test_a_body_over_the_limit_is_refused_before_anything_else(
    service: Service, tools: ToolServer
) -> None:
    response = await tools.post_event(b" " * (service.settings.max_body_bytes + 1), {})
    assert response.status_code == 413


async def test_a_row_that_somebody_holds_stops_its_own_event_only(
    service: Service, tools: ToolServer, client: McpClient, task: CreatedTask
) -> None:
    others = [await tools.create(client) for _ in range(20)]
    async with service.broker.db.own_connection() as somebody, somebody.transaction():
        await somebody.execute("SELECT FROM tasks WHERE task_ref = $1 FOR UPDATE", task.ref)
        held, *free = await asyncio.gather(
            *(tools.report(one, webhook_id=one.ref, statusMessage="x") for one in (task, *others))
        )
    assert (held.status_code, held.headers["retry-after"]) == (503, "1")
    assert [answer.status_code for answer in free] == [200] * 20
    assert (await tools.report(task, webhook_id=task.ref, statusMessage="x")).json()["applied"]


# --- signatures -------------------------------------------------------------------------------


async def test_every_current_secret_and_any_signature_of_the_list_will_do(
    service: Service, tools: ToolServer, task: CreatedTask
) -> None:
    body = tools.event({"taskRef": task.ref, "statusMessage": "x"})
    headers = tools.signed(body)
    headers["webhook-signature"] = f"v1a,xyz v1,AAAA {headers['webhook-signature']} v2,"
    assert (await tools.post_event(body, headers)).status_code == 200


@pytest.mark.parametrize("spoil", ["body", "webhook-id", "webhook-timestamp", "webhook-signature"])
async def test_whatever_was_signed_must_be_what_came(
    service: Service, tools: ToolServer, task: CreatedTask, spoil: str
) -> None:
    body = tools.event({"taskRef": task.ref, "statusMessage": "x"})
    headers = tools.signed(body)
    if spoil == "body":
        body += b" "
    elif spoil == "webhook-timestamp":
        headers[spoil] = str(int(headers[spoil]) + 1)
    else:
        headers[spoil] += "x"
    assert (await tools.post_event(body, headers)).status_code == 401


@pytest.mark.parametrize("missing", ["webhook-id", "webhook-timestamp", "webhook-signature"])
async def test_no_header_of_the_signature_may_be_missing(
    tools: ToolServer, task: CreatedTask, missing: str
) -> None:
    body = tools.event({"taskRef": task.ref})
    headers = tools.signed(body)
    del headers[missing]
    response = await tools.post_event(body, headers)
    assert response.status_code == 401
    assert "webhook-signature" in response.json()["detail"]


@pytest.mark.parametrize("seconds", [-301, 301])
async def test_an_old_or_early_timestamp_is_refused(
    service: Service, tools: ToolServer, task: CreatedTask, seconds: int
) -> None:
    body = tools.event({"taskRef": task.ref})
    stamped = int(service.clock().timestamp()) + seconds
    response = await tools.post_event(body, tools.signed(body, timestamp=stamped))
    assert response.status_code == 401


@pytest.mark.parametrize("timestamp", ["", "now", "1.5", "-1", "1e9", "９", "9" * 400])
async def test_a_timestamp_is_whole_seconds(
    tools: ToolServer, task: CreatedTask, timestamp: str
) -> None:
    body = tools.event({"taskRef": task.ref})
    headers = {k.encode(): v.encode() for k, v in tools.signed(body).items()}
    headers[b"webhook-timestamp"] = timestamp.encode()
    response = await tools._http.post(f"/v1/webhooks/{tools.name}", content=body, headers=headers)
    assert response.status_code == 401


async def test_a_signature_is_good_for_its_own_backend_only(
    service: Service, tools: ToolServer, task: CreatedTask
) -> None:
    await service.tool_server("other")
    body = tools.event({"taskRef": task.ref, "statusMessage": "x"})
    unknown = await tools.post_event(body, tools.signed(body), to="nobody")
    other = await tools.post_event(body, tools.signed(body), to="other")
    assert (unknown.status_code, other.status_code) == (401, 401)
    assert unknown.content == other.content  # and nobody learns which backends there are


async def test_a_key_is_good_for_its_own_backend_only(
    service: Service, tools: ToolServer, task: CreatedTask
) -> None:
    await service.tool_server("other")
    body = tools.event({"taskRef": task.ref})
    assert (await tools.post_event(body, tools.authorization, to="other")).status_code == 401


async def test_events_are_sent_by_post(service: Service) -> None:
    response = await service.http.get("/v1/webhooks/tools")
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
