"""How a tool server creates tasks: `POST /v1/tasks`."""

import asyncio
import hashlib
from typing import Any

import pytest

from tests.support.clock import ShiftedClock
from tests.support.service import (
    ELICITATION,
    Service,
    owner_of,
    running_service,
    test_settings,
)


async def test_a_new_task_comes_with_what_to_return_to_a_client_of_either_era(
    service: Service,
) -> None:
    tools, client = await service.tool_server(), service.client()
    body = {"owner": owner_of(client), "ttlMs": 60_000, "pollIntervalMs": 750}

    response = await tools.post_task({**body, "statusMessage": "queued"})

    assert response.status_code == 201
    made = response.json()
    modern, legacy = made["createTaskResult"], made["createTaskResultLegacy"]
    assert modern == {
        "resultType": "task",
        "taskId": modern["taskId"],
        "status": "working",
        "statusMessage": "queued",
        "createdAt": modern["createdAt"],
        "lastUpdatedAt": modern["createdAt"],
        "ttlMs": 60_000,
        "pollIntervalMs": 750,
    }
    assert legacy == {
        "task": {
            "taskId": modern["taskId"],
            "status": "working",
            "statusMessage": "queued",
            "createdAt": modern["createdAt"],
            "lastUpdatedAt": modern["createdAt"],
            "ttl": 60_000,
            "pollInterval": 750,
        }
    }
    assert len(modern["taskId"]) == 64


async def test_the_task_can_be_read_as_soon_as_its_creation_is_answered(service: Service) -> None:
    tools, client = await service.tool_server(), service.client()
    for _ in range(20):
        task = await tools.create(client)
        assert (await client.get(task.id))["status"] == "working"


@pytest.mark.parametrize(
    ("state", "shown"),
    [
        ({"status": "completed", "result": {"content": []}}, "completed"),
        ({"status": "failed", "error": {"code": -1, "message": "no"}}, "failed"),
        ({"status": "cancelled"}, "cancelled"),
        ({"status": "input_required", "inputRequests": {"q": ELICITATION}}, "input_required"),
        ({"status": "working"}, "working"),
    ],
)
async def test_a_task_may_begin_in_any_status(
    service: Service, state: dict[str, Any], shown: str
) -> None:
    tools, client = await service.tool_server(), service.client()
    response = await tools.post_task({"owner": owner_of(client), **state})
    assert response.status_code == 201
    made = response.json()["createTaskResult"]
    assert made["status"] == shown
    assert not {"result", "error", "inputRequests"} & made.keys()
    assert (await client.get(made["taskId"]))["status"] == shown


# --- the same job, told twice -----------------------------------------------------------------


async def test_creating_again_with_the_same_external_id_gives_the_first_task(
    service: Service,
) -> None:
    tools, client = await service.tool_server(), service.client()
    body = {"owner": owner_of(client), "externalId": "job-1"}
    first = await tools.post_task(body)
    await tools.report(
        await tools.create(client, externalId="job-1"), statusMessage="half way", ttlMs=90_000
    )

    again = await tools.post_task({**body, "ttlMs": 5, "status": "cancelled"})

    assert (first.status_code, again.status_code) == (201, 200)
    assert again.json()["taskRef"] == first.json()["taskRef"]
    shown = again.json()["createTaskResult"]
    assert shown["taskId"] == first.json()["createTaskResult"]["taskId"]
    assert (shown["status"], shown["statusMessage"], shown["ttlMs"]) == (
        "working",
        "half way",
        90_000,
    )


async def test_an_external_id_of_another_owner_is_a_conflict(service: Service) -> None:
    tools = await service.tool_server()
    await tools.create(service.client(), externalId="job-1")
    response = await tools.post_task({"owner": owner_of(service.client()), "externalId": "job-1"})
    assert response.status_code == 409
    assert response.headers["content-type"] == "application/problem+json"


async def test_backends_do_not_share_external_ids(service: Service) -> None:
    client = service.client()
    one, two = await service.tool_server("one"), await service.tool_server("two")
    first = await one.create(client, externalId="job")
    second = await two.create(client, externalId="job")
    assert first.ref != second.ref


async def test_an_expired_job_must_be_created_under_another_name(service: Service) -> None:
    tools, client = await service.tool_server(), service.client()
    await tools.create(client, externalId="job", ttlMs=1_000)
    service.clock.advance(milliseconds=1_000)
    response = await tools.post_task({"owner": owner_of(client), "externalId": "job"})
    assert response.status_code == 410
    assert "new externalId" in response.json()["detail"]


async def test_many_creates_at_once_are_each_their_own(service: Service) -> None:
    tools, client = await service.tool_server(), service.client()
    made = await asyncio.gather(
        *(tools.create(client, externalId=f"job-{n % 20}", tool=f"t{n}") for n in range(100))
    )
    assert len({task.ref for task in made}) == 20
    assert len({task.id for task in made}) == 20


# --- owners -----------------------------------------------------------------------------------


async def test_an_opaque_token_may_be_given_by_its_hash(service: Service) -> None:
    tools, client = await service.tool_server(), service.client()
    assert client.token is not None
    hashed = hashlib.sha256(client.token.encode()).hexdigest()
    for spelled in (hashed, hashed.upper()):
        task = await tools.create({"tokenSha256": spelled})
        assert (await client.get(task.id))["status"] == "working"


async def test_the_scheme_of_the_owners_header_may_be_spelled_in_any_case(
    service: Service,
) -> None:
    tools, client = await service.tool_server(), service.client()
    task = await tools.create({"authorization": f"bearer {client.token}"})
    assert (await client.get(task.id))["status"] == "working"


async def test_anonymous_owners_are_for_backends_that_allow_them(service: Service) -> None:
    tools = await service.tool_server()
    response = await tools.post_task({"owner": {"anonymous": True}})
    assert response.status_code == 403


@pytest.mark.parametrize(
    "owner",
    [
        {},
        {"anonymous": False},
        {"authorization": "Basic dTpw"},
        {"authorization": "Bearer tbc_unknown"},
        {"authorization": "Bearer tbk_mine"},
        {"authorization": "Bearer x", "anonymous": True},
        {"tokenSha256": "abc"},
        {"handle": "x"},
        {"issuer": "https://id.example", "subject": "me"},
    ],
)
async def test_an_owner_that_is_none_is_refused(service: Service, owner: dict[str, Any]) -> None:
    tools = await service.tool_server(allow_anonymous=True)
    response = await tools.post_task({"owner": owner})
    assert response.status_code == 422
    assert response.json()["errors"][0]["pointer"].startswith("/owner")
    assert "tbk_mine" not in response.text


# --- how long ---------------------------------------------------------------------------------


async def test_a_ttl_over_the_maximum_is_cut_and_the_answer_says_so(service: Service) -> None:
    tools, client = await service.tool_server(), service.client()
    for asked in (service.settings.max_ttl_ms + 1, 10**30, None):
        response = await tools.post_task({"owner": owner_of(client), "ttlMs": asked})
        assert response.json()["createTaskResult"]["ttlMs"] == service.settings.max_ttl_ms


async def test_a_backend_may_have_narrower_bounds(service: Service) -> None:
    client = service.client()
    tools = await service.tool_server(max_ttl_ms=5_000, default_ttl_ms=4_000, poll_interval_ms=9)
    shown = await client.get((await tools.create(client)).id)
    assert (shown["ttlMs"], shown["pollIntervalMs"]) == (4_000, 9)
    shown = await client.get((await tools.create(client, ttlMs=60_000)).id)
    assert shown["ttlMs"] == 5_000


async def test_where_it_is_allowed_a_task_may_live_for_ever(
    database_url: str, clock: ShiftedClock
) -> None:
    settings = test_settings(database_url, allow_unlimited_ttl=True)
    async with running_service(settings, clock) as service:
        tools, client = await service.tool_server(), service.client()
        task = await tools.create(client, ttlMs=None)
        clock.advance(seconds=400 * 24 * 3600)
        await service.sweep()
        shown = await client.get(task.id)
        assert (shown["ttlMs"], shown["status"]) == (None, "working")


# --- who may create ---------------------------------------------------------------------------


@pytest.mark.parametrize("authorization", [None, "Bearer tbk_unknown", "Basic x", "Bearer"])
async def test_a_backend_needs_its_key(service: Service, authorization: str | None) -> None:
    headers = {} if authorization is None else {"authorization": authorization}
    response = await service.http.post("/v1/tasks", json={"owner": {}}, headers=headers)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.headers["content-type"] == "application/problem+json"


async def test_a_body_over_the_limit_is_refused(service: Service) -> None:
    tools = await service.tool_server()
    large = {"owner": {"anonymous": True}, "tool": "x" * service.settings.max_body_bytes}
    assert (await tools.post_task(large)).status_code == 413


@pytest.mark.parametrize(
    ("members", "status", "pointer"),
    [
        ({"owner": "me"}, 400, "/owner"),
        ({"externalId": 7}, 400, "/externalId"),
        ({"externalId": ""}, 422, "/externalId"),
        ({"externalId": "x" * 256}, 422, "/externalId"),
        ({"externalId": "a\0b"}, 422, "/externalId"),
        ({"tool": "\0"}, 422, "/tool"),
        ({"ttlMs": 0}, 422, "/ttlMs"),
        ({"ttlMs": "1000"}, 400, "/ttlMs"),
        ({"ttlMs": 1.5}, 400, "/ttlMs"),
        ({"ttlMs": True}, 400, "/ttlMs"),
        ({"pollIntervalMs": 0}, 422, "/pollIntervalMs"),
        ({"pollIntervalMs": 10**12}, 422, "/pollIntervalMs"),
        ({"pollIntervalMs": None}, 400, "/pollIntervalMs"),
        ({"stallAfterMs": 0}, 422, "/stallAfterMs"),
        ({"status": "done"}, 422, "/status"),
        ({"status": 1}, 400, "/status"),
        ({"status": "completed"}, 422, "/result"),
        ({"status": "completed", "result": []}, 400, "/result"),
        ({"status": "completed", "result": {"resultType": "task"}}, 422, "/result/resultType"),
        ({"result": {}}, 422, "/result"),
        ({"status": "failed"}, 422, "/error"),
        ({"status": "failed", "error": {"code": 1}}, 400, "/error/message"),
        ({"status": "failed", "error": {"code": "1", "message": ""}}, 400, "/error/code"),
        ({"status": "input_required"}, 422, "/inputRequests"),
        ({"status": "input_required", "inputRequests": {}}, 422, "/inputRequests"),
        ({"status": "input_required", "inputRequests": {"a/b": 1}}, 400, "/inputRequests/a~1b"),
        (
            {"status": "input_required", "inputRequests": {"a": {"method": "tools/list"}}},
            422,
            "/inputRequests/a/method",
        ),
        (
            {"status": "input_required", "inputRequests": {"a": {"method": "elicitation/create"}}},
            422,
            "/inputRequests/a/params/message",
        ),
        ({"statusMessage": {}}, 400, "/statusMessage"),
    ],
)
async def test_what_does_not_fit_is_refused_with_its_place(
    service: Service, members: dict[str, Any], status: int, pointer: str
) -> None:
    tools, client = await service.tool_server(), service.client()
    response = await tools.post_task({"owner": owner_of(client), **members})
    assert (response.status_code, response.headers["content-type"]) == (
        status,
        "application/problem+json",
    )
    problem = response.json()
    assert problem["status"] == status
    assert [fault["pointer"] for fault in problem["errors"]] == [pointer]
    assert (await tools.list()).json()["tasks"] == []


async def test_a_disabled_backend_may_do_nothing(service: Service) -> None:
    tools, client = await service.tool_server(), service.client()
    task = await tools.create(client)
    await service.disable(tools)

    assert (await tools.post_task({"owner": owner_of(client)})).status_code == 403
    assert (await tools.report(task, statusMessage="x")).status_code == 403
    assert (await tools.read(task.ref)).status_code == 403
    assert (await client.get(task.id))["status"] == "working"
