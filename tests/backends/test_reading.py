"""How a tool server looks at its own tasks: `GET /v1/tasks`."""

from typing import Any

import pytest

from tests.support.service import ELICITATION, CreatedTask, Service, ToolServer


async def refs(tools: ToolServer, **query: Any) -> list[str]:
    response = await tools.list(**query)
    assert response.status_code == 200, response.text
    return [task["taskRef"] for task in response.json()["tasks"]]


async def test_a_task_is_shown_whole_and_without_its_id(service: Service) -> None:
    tools, client = await service.tool_server(), service.client()
    task = await tools.create(client, externalId="job", tool="resize", stallAfterMs=5_000)
    await tools.ask(task, "a", "b")
    await client.update(task.id, {"a": {"action": "accept"}})
    await client.cancel(task.id)

    response = await tools.read(task.ref)

    assert task.id not in response.text
    shown = response.json()
    assert {k: v for k, v in shown.items() if not k.endswith("At")} == {
        "taskRef": task.ref,
        "externalId": "job",
        "tool": "resize",
        "status": "input_required",
        "ttlMs": service.settings.default_ttl_ms,
        "pollIntervalMs": service.settings.default_poll_interval_ms,
        "stallAfterMs": 5_000,
        "inputRequests": {"b": ELICITATION},
        "cancelRequested": True,
        "inputResponses": {"a": {"action": "accept"}},
    }


async def test_results_and_errors_are_shown(service: Service) -> None:
    tools, client = await service.tool_server(), service.client()
    completed, failed = await tools.create(client), await tools.create(client)
    await tools.complete(completed, {"content": [], "x": 1})
    await tools.report(failed, status="failed", error={"code": 1, "message": "no"})
    assert (await tools.read(completed.ref)).json()["result"] == {"content": [], "x": 1}
    assert (await tools.read(failed.ref)).json()["error"] == {"code": 1, "message": "no"}


async def test_tasks_of_others_and_no_tasks_are_not_found(service: Service) -> None:
    tools, other = await service.tool_server("tools"), await service.tool_server("other")
    task = await other.create(service.client())
    for ref in (task.ref, "00000000-0000-7000-8000-000000000000", "no-uuid", task.id):
        response = await tools.read(ref)
        assert response.status_code == 404
        assert response.headers["content-type"] == "application/problem+json"


async def test_pages_show_every_task_once_newest_first(service: Service) -> None:
    tools, other = await service.tool_server("tools"), await service.tool_server("other")
    client = service.client()
    made = [(await tools.create(client)).ref for _ in range(7)]
    await other.create(client)

    seen: list[str] = []
    query: dict[str, Any] = {"limit": 3}
    while True:
        page = (await tools.list(**query)).json()
        seen += [task["taskRef"] for task in page["tasks"]]
        if "nextCursor" not in page:
            break
        query["cursor"] = page["nextCursor"]
        await tools.create(client)  # what comes meanwhile does not shift the pages

    assert sorted(seen, reverse=True) == seen
    assert set(seen) == set(made)
    assert len(seen) == 7


async def test_a_restarted_worker_finds_its_jobs_by_status(service: Service) -> None:
    tools, client = await service.tool_server(), service.client()
    tasks: list[CreatedTask] = [await tools.create(client, externalId=f"job-{n}") for n in range(4)]
    await tools.ask(tasks[1], "q")
    await tools.complete(tasks[2])

    assert await refs(tools, status="working") == [tasks[3].ref, tasks[0].ref]
    assert await refs(tools, status="input_required") == [tasks[1].ref]
    assert await refs(tools, status="completed") == [tasks[2].ref]
    assert await refs(tools, externalId="job-3") == [tasks[3].ref]
    assert await refs(tools, externalId="job-3", status="failed") == []


async def test_a_list_leaves_out_what_may_be_large(service: Service) -> None:
    tools, client = await service.tool_server(), service.client()
    completed, failed, asking = [await tools.create(client) for _ in range(3)]
    await tools.complete(completed)
    await tools.report(failed, status="failed", error={"code": 1, "message": "no"})
    await tools.ask(asking, "a", "b")
    await client.update(asking.id, {"a": {"action": "accept"}})

    listed = {task["taskRef"]: task for task in (await tools.list()).json()["tasks"]}

    assert not any({"result", "error", "inputRequests"} & task.keys() for task in listed.values())
    assert listed[failed.ref]["statusMessage"] == "no"
    assert listed[asking.ref]["inputResponses"] == {"a": {"action": "accept"}}
    assert listed[asking.ref]["cancelRequested"] is False


async def test_expired_tasks_are_not_listed(service: Service) -> None:
    tools, client = await service.tool_server(), service.client()
    await tools.create(client, ttlMs=1_000)
    lasting = await tools.create(client)
    service.clock.advance(milliseconds=1_000)
    assert await refs(tools) == [lasting.ref]


@pytest.mark.parametrize(
    "query",
    [
        {"status": "paused"},
        {"limit": 0},
        {"limit": 201},
        {"limit": "many"},
        {"cursor": "?"},
        {"cursor": "AAAA"},
        {"externalId": ""},
        {"externalId": "a\0b"},
    ],
)
async def test_a_bad_query_is_refused_with_its_place(
    service: Service, query: dict[str, Any]
) -> None:
    tools = await service.tool_server()
    response = await tools.list(**query)
    assert response.status_code == 400
    assert response.headers["content-type"] == "application/problem+json"
    assert [fault["pointer"] for fault in response.json()["errors"]] == [f"/{next(iter(query))}"]
