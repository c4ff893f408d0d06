import assert from "node:assert/strict";
import { once } from "node:events";
import { test, type TestContext } from "node:test";
import { setImmediate as othersTurn, setTimeout as sleep } from "node:timers/promises";

import { TaskFailed, textResult, type Task, type TaskBrokerOptions } from "taskbroker-sdk";

import { brokerAt, drop, loopback, page, refuse, seen, state, type Answer } from "./loopback.js";

const OWNER = { anonymous: true } as const;
const INTERNAL_ERROR = -32603;
const STOPPED = { code: INTERNAL_ERROR, message: "the tool server was stopped" };

/** A broker that takes everything, or answers events as it is told to. */
async function tools(t: TestContext, event: Answer = () => state(), options: Options = {}) {
  const errors: unknown[] = [];
  const onError = (error: unknown) => errors.push(error);
  t.after(() => broker.close()); // before the loopback: it may have something to report
  const events: Record<string, unknown>[] = [];
  const { url, received } = await loopback(t, (request, response) => {
    if (request.method === "GET") return seen();
    if (request.url === "/v1/tasks") {
      return { taskRef: "a-ref", createTaskResult: { status: "working" } };
    }
    events.push(JSON.parse(request.body).data);
    return event(request, response);
  });
  const broker = brokerAt(url, { onError, ...options });
  return { received, events, errors, broker };
}

/** Answers events in turn, and further ones as a broker that is well. */
function inTurn(...answers: Answer[]): Answer {
  return (...call) => (answers.shift() ?? (() => state()))(...call);
}

type Options = Partial<TaskBrokerOptions>;

/** Waits until a condition holds; the test's own timeout is its patience. */
async function until(condition: () => boolean): Promise<void> {
  while (!condition()) await new Promise((resolve) => setTimeout(resolve, 5));
}

function nameOf(error: unknown): string {
  return (error as Error).name;
}

test("what work returns completes its task", { timeout: 10_000 }, async (t) => {
  const { broker, events } = await tools(t);
  const result = textResult("done");
  const task = await broker.start(OWNER, () => result);
  await until(() => events.length === 1);
  assert.deepEqual(events, [{ taskRef: task.ref, status: "completed", result }]);
});

test("start answers before the work begins, however busy that is", async (t) => {
  const { broker } = await tools(t);
  let begun = false;
  await broker.start(OWNER, () => {
    begun = true;
    return textResult("done");
  });
  assert.equal(begun, false);
  await until(() => begun);
});

test("TaskFailed is the error of the task", { timeout: 10_000 }, async (t) => {
  const { broker, events, errors } = await tools(t);
  await broker.start(OWNER, () => {
    throw new TaskFailed(-32050, "no luck", { why: "because" });
  });
  await until(() => events.length === 1);
  const error = { code: -32050, message: "no luck", data: { why: "because" } };
  assert.deepEqual(events, [{ taskRef: "a-ref", status: "failed", error }]);
  assert.deepEqual(errors, []);
});

test("the client learns nothing from other exceptions, the author all", async (t) => {
  const { broker, events, errors } = await tools(t);
  const mistake = new Error("cannot read /etc/secrets");
  await broker.start(OWNER, async () => {
    throw mistake;
  });
  await until(() => events.length === 1);
  const error = { code: INTERNAL_ERROR, message: "internal error in the tool server" };
  assert.deepEqual(events, [{ taskRef: "a-ref", status: "failed", error }]);
  assert.deepEqual(errors, [mistake]);
});

test("an outcome that the broker refuses fails the task", { timeout: 10_000 }, async (t) => {
  const tooLarge = refuse(413, { title: "The body is too large" });
  const { broker, events, errors } = await tools(t, inTurn(tooLarge));
  await broker.start(OWNER, () => textResult("a very long text"));
  await until(() => events.length === 2);
  assert.equal(events[1]?.status, "failed");
  assert.equal((errors[0] as Error).message, "The body is too large");
});

test("an outcome that is too large for a proxy fails the task", { timeout: 10_000 }, async (t) => {
  const { broker, events } = await tools(t, inTurn(page(413)));
  await broker.start(OWNER, () => textResult("a very long text"));
  await until(() => events.length === 2);
  const error = { code: INTERNAL_ERROR, message: "the broker refused the outcome of the tool" };
  assert.deepEqual(events[1], { taskRef: "a-ref", status: "failed", error });
});

test("a promise to report is kept by silent work", { timeout: 10_000 }, async (t) => {
  const { broker, events, received } = await tools(t, undefined, { heartbeatMs: 20 });
  const work = async ({ signal }: Task) => {
    await once(signal, "abort");
    return textResult("too late");
  };
  await broker.start(OWNER, work, { stallAfterMs: 300 });
  await until(() => events.length >= 2);
  assert.deepEqual(events.slice(0, 2), [{ taskRef: "a-ref" }, { taskRef: "a-ref" }]);
  const looks = received.filter(({ method }) => method === "GET");
  assert(looks.length >= 2, "between the events it looks");
  for (const { url, body } of received) {
    // A date could make a message stale that was sent before.
    if (url.startsWith("/v1/webhooks/")) assert.equal(JSON.parse(body).timestamp, undefined);
  }
  await broker.close();
});

test("closing waits for no work that is deaf", { timeout: 10_000 }, async (t) => {
  const { broker, events } = await tools(t, undefined, { graceMs: 20 });
  await broker.start(OWNER, () => new Promise(() => undefined));
  await broker.close();
  await broker.close();
  assert.deepEqual(events, [{ taskRef: "a-ref", status: "failed", error: STOPPED }]);
});

test("a result that comes while closing counts", { timeout: 10_000 }, async (t) => {
  const { broker, events } = await tools(t);
  let begun = false;
  await broker.start(OWNER, async ({ signal }) => {
    begun = true;
    await once(signal, "abort");
    await othersTurn();
    return textResult("half of it");
  });
  await until(() => begun);
  await broker.close();
  const result = textResult("half of it");
  assert.deepEqual(events, [{ taskRef: "a-ref", status: "completed", result }]);
});

test("closing fails what stops without a result", { timeout: 10_000 }, async (t) => {
  const { broker, events, errors } = await tools(t);
  const never = textResult("never");
  await broker.start(OWNER, ({ signal }) => sleep(3_600_000, never, { signal }));
  await broker.close();
  assert.deepEqual(events, [{ taskRef: "a-ref", status: "failed", error: STOPPED }]);
  assert.deepEqual(errors, []);
});

test("a closed broker starts nothing, and creates nothing for it", async (t) => {
  const { broker, received } = await tools(t);
  await broker.close();
  await assert.rejects(broker.start(OWNER, () => textResult("never")), /client is closed/);
  assert.equal(received.length, 0);
});

test("a task that is created while closing is not left behind", { timeout: 10_000 }, async (t) => {
  const { broker, events, received } = await tools(t);
  let ran = false;
  const starting = broker.start(OWNER, () => {
    ran = true;
    return textResult("never");
  });
  await broker.close();
  await starting;
  assert.equal(received[0]?.url, "/v1/tasks");
  assert.deepEqual(events, [{ taskRef: "a-ref", status: "failed", error: STOPPED }]);
  assert.equal(ran, false);
});

test("closing gives up on a broker that is away", { timeout: 10_000 }, async (t) => {
  const { broker, events, errors } = await tools(t, drop, { attempts: 2, graceMs: 0 });
  await broker.start(OWNER, () => new Promise(() => undefined));
  await broker.close();
  assert.equal(events.length, 2);
  assert.deepEqual(errors.map(nameOf), ["Unreachable"]);
});

test("closing takes no longer than the grace and one attempt", { timeout: 5_000 }, async (t) => {
  const silent = () => undefined;
  const { broker, events, errors } = await tools(t, silent, { timeoutMs: 200, graceMs: 20 });
  await broker.start(OWNER, () => new Promise(() => undefined));
  await broker.close();
  assert.deepEqual(events, [{ taskRef: "a-ref", status: "failed", error: STOPPED }]);
  assert.deepEqual(errors.map(nameOf), ["BrokerError"]);
});

test("closing does not wait out a pause, but reports once more", { timeout: 5_000 }, async (t) => {
  const busy = inTurn(refuse(503, {}, { "retry-after": "60" }));
  const { broker, events, errors, received } = await tools(t, busy);
  await broker.start(OWNER, () => textResult("done"));
  await until(() => events.length === 1);
  await broker.close();
  const ids = received.map(({ headers }) => headers["webhook-id"]).filter(Boolean);
  assert.equal(ids.length, 2);
  assert.equal(ids[0], ids[1]);
  assert.deepEqual(errors, []);
});

test("an outcome is reported, however long the broker is away", { timeout: 10_000 }, async (t) => {
  const away = inTurn(drop, refuse(503, {}), page(404), page(200), page(401));
  const { broker, events, errors, received } = await tools(t, away, { attempts: 2 });
  await broker.start(OWNER, () => textResult("done"));
  await until(() => events.length === 6);
  const reports = received.filter(({ url }) => url.startsWith("/v1/webhooks/"));
  assert.equal(new Set(reports.map(({ headers }) => headers["webhook-id"])).size, 1);
  assert.equal(new Set(reports.map(({ body }) => body)).size, 1);
  assert.deepEqual(errors.map(nameOf), ["Unreachable", "Unreachable"]);
});

for (const status of [401, 403]) {
  test(`an outcome outlives a ${status}, which may pass`, { timeout: 10_000 }, async (t) => {
    const { broker, events, errors } = await tools(t, inTurn(refuse(status, {})));
    await broker.start(OWNER, () => textResult("done"));
    await until(() => errors.length === 1);
    await broker.close(); // which does not wait out the long pause
    assert.deepEqual(errors.map(nameOf), ["Problem"]);
    assert.deepEqual(events.map((event) => event.status), ["completed", "completed"]);
  });
}

test("a page that is not the broker's does not stop the work", { timeout: 10_000 }, async (t) => {
  const { broker, events } = await tools(t, inTurn(page(404), page(410)));
  const work = async ({ signal }: Task) => {
    await until(() => events.length >= 3);
    signal.throwIfAborted();
    return textResult("done");
  };
  await broker.start(OWNER, work, { stallAfterMs: 60 });
  const isEnd = ({ status }: Record<string, unknown>) => status !== undefined;
  await until(() => events.some(isEnd));
  assert.equal(events.find(isEnd)?.status, "completed");
});

test("an outcome that is no JSON fails the task", { timeout: 10_000 }, async (t) => {
  const { broker, events } = await tools(t);
  await broker.start(OWNER, () => ({ content: [], structuredContent: { mean: NaN } }));
  await until(() => events.length === 1);
  const error = { code: INTERNAL_ERROR, message: "the outcome of the tool cannot be sent" };
  assert.deepEqual(events, [{ taskRef: "a-ref", status: "failed", error }]);
});

test("progress that gets lost does not end the work", { timeout: 10_000 }, async (t) => {
  const { broker, events, errors } = await tools(t, inTurn(drop), { attempts: 1 });
  await broker.start(OWNER, async (task) => {
    await task.progress("half way");
    return textResult("done");
  });
  await until(() => events.length === 2);
  assert.equal(events[1]?.status, "completed");
  assert.deepEqual(errors.map(nameOf), ["Unreachable"]);
});

test("questions outlive an outage", { timeout: 10_000 }, async (t) => {
  const answer = { action: "accept", content: { sure: true } };
  const looks = [drop, refuse(503, {}), () => seen({ inputResponses: { sure: answer } })];
  const broker = await loopback(t, () => state(), ...looks);
  const errors: unknown[] = [];
  const options = { attempts: 1, onError: (error: unknown) => errors.push(error) };
  const task = brokerAt(broker.url, options).task("a-ref");
  assert.deepEqual(await task.ask({ sure: { method: "roots/list" } }), { sure: answer });
  assert.deepEqual(errors.map(nameOf), ["Unreachable", "Unreachable"]);
});

test("a question is not answered by what every object has", { timeout: 10_000 }, async (t) => {
  const inputResponses = { constructor: { action: "decline" } };
  const broker = await loopback(t, () => state(), () => seen({ inputResponses }));
  const task = brokerAt(broker.url).task("a-ref");
  assert.deepEqual(await task.ask({ constructor: { method: "roots/list" } }), inputResponses);
});

test("whoever waits for a broker that is away can be stopped", { timeout: 10_000 }, async (t) => {
  const away = refuse(503, {}, { "retry-after": "60" });
  const { broker, events } = await tools(t, inTurn(away));
  await broker.start(OWNER, async (task) => {
    await task.progress("half way");
    return textResult("done");
  });
  await until(() => events.length === 1);
  await broker.close();
  assert.deepEqual(events[1], { taskRef: "a-ref", status: "failed", error: STOPPED });
});

test("an onError that throws does no harm to the outcome", { timeout: 10_000 }, async (t) => {
  const onError = () => {
    throw new Error("the log is full");
  };
  t.mock.method(console, "error", () => undefined);
  const { broker, events } = await tools(t, undefined, { onError });
  await broker.start(OWNER, () => {
    throw new Error("a mistake");
  });
  await until(() => events.length === 1);
  assert.equal(events[0]?.status, "failed");
});

test("work that runs is not started again", { timeout: 10_000 }, async (t) => {
  const { broker } = await tools(t);
  let runs = 0;
  const work = ({ signal }: Task) => {
    runs++;
    return sleep(3_600_000, textResult("never"), { signal });
  };
  const first = await broker.start(OWNER, work, { externalId: "job-81" });
  const second = await broker.start(OWNER, work, { externalId: "job-81" });
  assert.equal(first.signal, second.signal);
  assert.equal(runs, 1);
  await broker.close();
});

test("a restarted server goes on with its tasks", { timeout: 10_000 }, async (t) => {
  const { broker, events, received } = await tools(t);
  const task = await broker.resume("a-ref", () => textResult("done after all"));
  await until(() => events.length === 1);
  assert.equal(events[0]?.status, "completed");
  assert.deepEqual([received[0]?.method, received[0]?.url], ["GET", `/v1/tasks/${task.ref}`]);
});

test("work for a task that has gone is told to stop", { timeout: 10_000 }, async (t) => {
  const { broker } = await tools(t, refuse(410, { title: "The task has expired" }));
  const task = broker.task("a-ref");
  await assert.rejects(task.progress("half way"), { name: "Problem", status: 410 });
  assert.throws(() => task.signal.throwIfAborted(), { name: "CancelRequested" });
});
