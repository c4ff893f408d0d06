"""What an MCP client of 2026-07-28 sees of its tasks."""

import re
from typing import Any

import pytest

from tests.support.clock import ShiftedClock
from tests.support.queries import QueryCount
from tests.support.service import (
    ELICITATION,
    TASKS,
    Service,
    ToolServer,
    running_service,
    test_settings,
)

NOT_FOUND: dict[str, Any] = {"code": -32602, "message": "Failed to retrieve task: Task not found"}
EXPIRED: dict[str, Any] = {"code": -32602, "message": "Failed to retrieve task: Task has expired"}
MOMENT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")


async def test_discovery_advertises_the_extension_as_an_empty_object(service: Service) -> None:
    result = (await service.client().request("server/discover")).json()["result"]

    assert result["resultType"] == "complete"
    assert result["supportedVersions"] == [
        "2026-07-28", "2025-11-25", "2025-06-18", "2025-03-26",
    ]  # fmt: skip
    assert result["capabilities"] == {"extensions": {TASKS: {}}}
    assert result["ttlMs"] > 0
    assert result["cacheScope"] == "public"
    assert result["_meta"]["io.modelcontextprotocol/serverInfo"]["name"] == "task-broker"


async def test_discovery_needs_no_capability_of_the_client(service: Service) -> None:
    meta = {
        "io.modelcontextprotocol/protocolVersion": "2026-07-28",
        "io.modelcontextprotocol/clientCapabilities": {},
    }
    response = await service.client().request("server/discover", meta=meta)
    assert response.json()["result"]["capabilities"] == {"extensions": {TASKS: {}}}


async def test_a_working_task_has_exactly_the_members_of_a_task(service: Service) -> None:
    tools, client = await service.tool_server(), service.client()
    task = await tools.create(client, ttlMs=60_000, pollIntervalMs=500)

    seen = await client.get(task.id)

    assert list(seen) == [
        "resultType", "taskId", "status", "createdAt", "lastUpdatedAt", "ttlMs", "pollIntervalMs",
        "_meta",
    ]  # fmt: skip
    assert (seen["resultType"], seen["taskId"], seen["status"]) == ("complete", task.id, "working")
    assert (seen["ttlMs"], seen["pollIntervalMs"]) == (60_000, 500)
    assert MOMENT.fullmatch(seen["createdAt"])
    assert MOMENT.fullmatch(seen["lastUpdatedAt"])


async def test_progress_shows_in_the_message_and_in_last_updated(service: Service) -> None:
    tools, client = await service.tool_server(), service.client()
    task = await tools.create(client)
    service.clock.advance(seconds=5)

    await tools.report(task, statusMessage="10 of 40 files")

    seen = await client.get(task.id)
    assert (seen["status"], seen["statusMessage"]) == ("working", "10 of 40 files")
    assert seen["lastUpdatedAt"] > seen["createdAt"]


async def test_polling_does_not_move_last_updated(service: Service) -> None:
    tools, client = await service.tool_server(), service.client()
    task = await tools.create(client)
    first = await client.get(task.id)
    service.clock.advance(seconds=5)
    assert await client.get(task.id) == first


async def test_a_completed_task_brings_its_result(service: Service) -> None:
    tools, client = await service.tool_server(), service.client()
    task = await tools.create(client)
    await tools.complete(task, {"content": [{"type": "text", "text": "42"}], "isError": True})

    seen = await client.get(task.id)

    assert seen["status"] == "completed"  # a tool that ran and reports failure has completed
    assert seen["result"] == {
        "resultType": "complete",
        "content": [{"type": "text", "text": "42"}],
        "isError": True,
    }
    assert not {"error", "inputRequests", "statusMessage"} & seen.keys()


async def test_a_failed_task_brings_its_error_and_says_what_went_wrong(service: Service) -> None:
    tools, client = await service.tool_server(), service.client()
    task = await tools.create(client)
    error = {"code": -32050, "message": "GPU lost", "data": {"node": 7}}
    await tools.report(task, status="failed", error=error)

    seen = await client.get(task.id)

    assert (seen["status"], seen["error"], seen["statusMessage"]) == ("failed", error, "GPU lost")
    assert not {"result", "inputRequests"} & seen.keys()


# --- questions and answers --------------------------------------------------------------------


async def test_questions_are_shown_until_they_are_answered(service: Service) -> None:
    tools, client = await service.tool_server(), service.client()
    task = await tools.create(client)
    await tools.ask(task, "name", "size")

    seen = await client.get(task.id)
    assert seen["status"] == "input_required"
    assert seen["inputRequests"] == {"name": ELICITATION, "size": ELICITATION}

    acknowledged = await client.update(task.id, {"name": {"action": "accept"}})
    assert acknowledged.keys() == {"resultType", "_meta"}
    seen = await client.get(task.id)
    assert (seen["status"], list(seen["inputRequests"])) == ("input_required", ["size"])

    await client.update(task.id, {"size": {"action": "decline"}})
    seen = await client.get(task.id)
    assert seen["status"] == "working"
    assert "inputRequests" not in seen


async def test_answers_to_what_is_not_outstanding_are_ignored(service: Service) -> None:
    tools, client = await service.tool_server(), service.client()
    task = await tools.create(client)
    await tools.ask(task, "name")

    await client.update(task.id, {"never asked": {}, "name": {"first": True}})
    await client.update(task.id, {"name": {"second": True}})

    assert (await tools.read(task.ref)).json()["inputResponses"] == {"name": {"first": True}}


async def test_a_question_that_the_backend_withdrew_cannot_be_answered(service: Service) -> None:
    tools, client = await service.tool_server(), service.client()
    task = await tools.create(client)
    await tools.ask(task, "name")
    await tools.report(task, status="working")

    await client.update(task.id, {"name": {"late": True}})

    seen = (await tools.read(task.ref)).json()
    assert (seen["status"], seen["inputResponses"]) == ("working", {})


async def test_an_answer_to_a_terminal_task_is_acknowledged_and_changes_nothing(
    service: Service,
) -> None:
    tools, client = await service.tool_server(), service.client()
    task = await tools.create(client)
    await tools.ask(task, "name")
    await tools.complete(task)
    before = await client.get(task.id)

    await client.update(task.id, {"name": {}})

    assert await client.get(task.id) == before
    assert (await tools.read(task.ref)).json()["inputResponses"] == {}


# --- cancelling -------------------------------------------------------------------------------


async def test_cancel_is_a_wish_that_the_backend_fulfils(service: Service) -> None:
    tools, client = await service.tool_server(), service.client()
    task = await tools.create(client)

    acknowledged = await client.cancel(task.id)
    assert acknowledged["resultType"] == "complete"
    assert acknowledged.keys() == {"resultType", "_meta"}
    assert (await client.get(task.id))["status"] == "working"

    told = (await tools.report(task, statusMessage="still here")).json()
    assert told["cancelRequested"] is True
    await tools.report(task, status="cancelled")
    assert (await client.get(task.id))["status"] == "cancelled"


async def test_a_backend_may_finish_in_spite_of_the_wish(service: Service) -> None:
    tools, client = await service.tool_server(), service.client()
    task = await tools.create(client)
    await client.cancel(task.id)
    await tools.complete(task)
    assert (await client.get(task.id))["status"] == "completed"


async def test_cancel_of_a_terminal_task_is_acknowledged_and_changes_nothing(
    service: Service,
) -> None:
    tools, client = await service.tool_server(), service.client()
    task = await tools.create(client)
    await tools.complete(task)
    before = await client.get(task.id)
    assert (await client.cancel(task.id))["resultType"] == "complete"
    assert await client.get(task.id) == before


async def test_a_wish_that_no_backend_answers_ends_cancelled_after_the_grace(
    service: Service,
) -> None:
    tools, client = await service.tool_server(), service.client()
    task = await tools.create(client)
    await client.cancel(task.id)

    service.clock.advance(milliseconds=service.settings.cancel_grace_ms - 1_000)
    await service.sweep()
    assert (await client.get(task.id))["status"] == "working"

    service.clock.advance(milliseconds=1_000)
    assert (await service.sweep()).cancelled == 1
    seen = await client.get(task.id)
    assert seen["status"] == "cancelled"
    assert "did not answer" in seen["statusMessage"]


async def test_a_backend_that_reports_on_is_alive_and_gets_another_grace(service: Service) -> None:
    tools, client = await service.tool_server(), service.client()
    task = await tools.create(client)
    await client.cancel(task.id)
    service.clock.advance(milliseconds=service.settings.cancel_grace_ms - 1_000)
    await tools.report(task, statusMessage="cleaning up")

    service.clock.advance(milliseconds=2_000)
    await service.sweep()
    assert (await client.get(task.id))["status"] == "working"

    service.clock.advance(milliseconds=service.settings.cancel_grace_ms)
    await service.sweep()
    assert (await client.get(task.id))["status"] == "cancelled"


# --- whose task it is -------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["tasks/get", "tasks/update", "tasks/cancel"])
async def test_nobody_but_the_owner_learns_that_a_task_exists(
    service: Service, method: str
) -> None:
    tools, owner, stranger = await service.tool_server(), service.client(), service.client()
    task = await tools.create(owner)
    purged = await tools.create(stranger, ttlMs=1)
    service.clock.advance(milliseconds=service.settings.expired_grace_ms + 2)
    await service.sweep()
    flipped = task.id[:-1] + ("A" if task.id[-1] != "A" else "B")
    more: dict[str, Any] = {"inputResponses": {}} if method == "tasks/update" else {}

    ids: list[str] = [task.id, purged.id, flipped, "A" * 64, "not an id", "", "ä" * 64]
    answers = {
        (await stranger.request(method, {"taskId": task_id, **more})).content for task_id in ids
    }

    assert len(answers) == 1  # the very same bytes for foreign, purged, forged and malformed ids
    assert NOT_FOUND["message"].encode() in answers.pop()


async def test_a_wrong_credential_or_id_never_reaches_the_database(
    service: Service, queries: QueryCount
) -> None:
    tools, owner, stranger = await service.tool_server(), service.client(), service.client()
    task = await tools.create(owner)
    before = await queries()

    for client, task_id in ((stranger, task.id), (owner, "A" * 64), (owner, "malformed")):
        assert await client.error("tasks/get", task_id) == NOT_FOUND
    assert await queries() == before

    await owner.get(task.id)
    assert await queries() == before + 1


async def test_a_client_key_owns_tasks_as_a_token_does(service: Service) -> None:
    tools, client = await service.tool_server(), await service.keyed_client()
    task = await tools.create(client)
    assert (await client.get(task.id))["status"] == "working"
    assert await service.client().error("tasks/get", task.id) == NOT_FOUND


async def test_an_anonymous_task_belongs_to_whoever_has_its_id(service: Service) -> None:
    tools, client = await service.tool_server(allow_anonymous=True), service.anonymous()
    task = await tools.create(client)
    assert (await client.get(task.id))["status"] == "working"
    assert await service.client().error("tasks/get", task.id) == NOT_FOUND


async def test_without_a_backend_that_allows_it_nobody_is_anonymous(service: Service) -> None:
    await service.tool_server()
    response = await service.anonymous().request("tasks/get", {"taskId": "A" * 64})
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    "authorization",
    ["Bearer tbc_unknown", "Bearer tbk_of-a-backend", "Basic dTpw", "Bearer", "x y"],
)
async def test_a_credential_that_is_none_is_refused(service: Service, authorization: str) -> None:
    response = await service.client().request(
        "tasks/get", {"taskId": "A" * 64}, headers={"authorization": authorization}
    )
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == 'Bearer error="invalid_token"'
    assert "tbk_of" not in response.text


# --- keys and time ----------------------------------------------------------------------------


async def test_ids_outlive_the_rotation_of_the_server_key(
    service: Service, database_url: str, clock: ShiftedClock
) -> None:
    tools, client = await service.tool_server(), service.client()
    old = await tools.create(client, externalId="job")
    ring = (*test_settings(database_url).secret_keys, *service.settings.secret_keys)

    async with running_service(test_settings(database_url, secret_keys=ring), clock) as rotated:
        same_client = rotated.client(client.token)
        assert (await same_client.get(old.id))["status"] == "working"
        tools_now = ToolServer(rotated.http, clock, tools.name, tools.key, tools.webhook_secret)
        assert await tools_now.create(same_client, externalId="job") == old  # the same id again
        new = await tools_now.create(same_client)

    without_old = test_settings(database_url, secret_keys=ring[:1])
    async with running_service(without_old, clock) as forgetful:
        client_later = forgetful.client(client.token)
        assert await client_later.error("tasks/get", old.id) == NOT_FOUND
        assert (await client_later.get(new.id))["status"] == "working"


async def test_a_task_is_expired_from_the_very_moment(service: Service) -> None:
    tools, client = await service.tool_server(), service.client()
    task = await tools.create(client, ttlMs=600_000)
    finished = await tools.create(client, ttlMs=600_000)
    await tools.complete(finished)
    assert (await client.get(finished.id))["status"] == "completed"  # and it is remembered

    service.clock.advance(milliseconds=600_000)

    for method in ("tasks/get", "tasks/update", "tasks/cancel"):
        assert await client.error(method, task.id, inputResponses={}) == EXPIRED
        assert await client.error(method, finished.id, inputResponses={}) == EXPIRED
    assert await service.client().error("tasks/get", task.id) == NOT_FOUND


async def test_a_purged_task_is_forgotten_even_where_it_was_remembered(service: Service) -> None:
    tools, client = await service.tool_server(), service.client()
    task = await tools.create(client, ttlMs=1_000)
    await tools.complete(task)
    await client.get(task.id)
    service.clock.advance(milliseconds=1_000 + service.settings.expired_grace_ms)
    assert (await service.sweep()).purged == 1
    assert await client.error("tasks/get", task.id) == NOT_FOUND


async def test_an_expired_task_is_purged_after_its_grace(service: Service) -> None:
    tools, client = await service.tool_server(), service.client()
    task = await tools.create(client, ttlMs=1_000)
    await tools.ask(task, "left open")

    service.clock.advance(milliseconds=1_000)
    assert (await service.sweep()).purged == 0
    service.clock.advance(milliseconds=service.settings.expired_grace_ms)
    assert (await service.sweep()).purged == 1
    assert await client.error("tasks/get", task.id) == NOT_FOUND


async def test_a_task_stalls_when_no_event_came_for_as_long_as_promised(service: Service) -> None:
    tools, client = await service.tool_server(), service.client()
    task = await tools.create(client, stallAfterMs=10_000)
    service.clock.advance(milliseconds=9_000)
    await tools.report(task, statusMessage="alive")
    service.clock.advance(milliseconds=9_000)
    assert (await service.sweep()).stalled == 0

    service.clock.advance(milliseconds=1_000)
    assert (await service.sweep()).stalled == 1

    seen = await client.get(task.id)
    assert seen["status"] == "failed"
    assert seen["error"] == {"code": -32603, "message": "the tool server stopped reporting"}


async def test_a_task_that_waits_for_its_client_does_not_stall(service: Service) -> None:
    tools, client = await service.tool_server(), service.client()
    task = await tools.create(client, stallAfterMs=10_000)
    await tools.ask(task, "name")
    service.clock.advance(seconds=60)
    assert (await service.sweep()).stalled == 0

    await client.update(task.id, {"name": {}})
    service.clock.advance(seconds=10)
    assert (await service.sweep()).stalled == 1
    assert (await client.get(task.id))["status"] == "failed"
