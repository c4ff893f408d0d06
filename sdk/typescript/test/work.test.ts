import assert from "node:assert/strict";
import { once } from "node:events";
import { test, type TestContext } from "node:test";

import { TaskFailed, textResult, type Task, type TaskBrokerOptions } from "taskbroker-sdk";

import { brokerAt, loopback, refuse, state, type Answer } from "./loopback.js";

const OWNER = { anonymous: true } as const;
const INTERNAL_ERROR = -32603;

/** A broker that takes everything, or answers events as it is told to. */
async function tools(t: TestContext, event: Answer = () => state(), options: Options = {}) {
  const events: Record<string, unknown>[] = [];
  const broker = await loopback(t, (request, response) => {
    if (request.method === "GET")
      return { taskRef: "a-ref", status: "working", inputResponses: {} };
    if (request.url === "/v1/tasks") {
      return { taskRef: "a-ref", createTaskResult: { status: "working" } };
    }
    events.push(JSON.parse(request.body).data);
    return event(request, response);
  });
  const errors: unknown[] = [];
  const onError = (error: unknown) => errors.push(error);
  return { ...broker, events, errors, broker: brokerAt(broker.url, { onError, ...options }) };
}

type Options = Partial<TaskBrokerOptions>;

/** Waits until a condition holds; the test's own timeout is its patience. */
async function until(condition: () => boolean): Promise<void> {
  while (!condition()) await new Promise((resolve) => setTimeout(resolve, 5));
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
  const error = { code: INTERNAL_ERROR, message: "the tool failed unexpectedly" };
  assert.deepEqual(events, [{ taskRef: "a-ref", status: "failed", error }]);
  assert.deepEqual(errors, [mistake]);
});

test("an outcome that the broker refuses fails the task", { timeout: 10_000 }, async (t) => {
  const tooLarge = refuse(413, { title: "The body is too large" });
  const answers = [tooLarge, () => state()];
  const { broker, events, errors } = await tools(t, (...call) => answers.shift()?.(...call));
  await broker.start(OWNER, () => textResult("a very long text"));
  await until(() => events.length === 2);
  assert.equal(events[1]?.status, "failed");
  assert.equal((errors[0] as Error).message, "The body is too large");
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
  await broker.close();
});

test("closing waits for no work that is deaf", { timeout: 10_000 }, async (t) => {
  const { broker, events } = await tools(t);
  await broker.start(OWNER, () => new Promise(() => undefined));
  await broker.close();
  await broker.close();
  const error = { code: INTERNAL_ERROR, message: "the tool server was stopped" };
  assert.deepEqual(events, [{ taskRef: "a-ref", status: "failed", error }]);
});

test("closing gives up on a broker that is away", { timeout: 10_000 }, async (t) => {
  const { broker, events, errors } = await tools(t, () => undefined);
  await broker.start(OWNER, () => new Promise(() => undefined));
  await broker.close();
  assert.equal(events.length, 1);
  assert.match((errors[0] as Error).message, /was closed/);
});

test("work that runs is not started again", { timeout: 10_000 }, async (t) => {
  const { broker } = await tools(t);
  let runs = 0;
  const work = () => {
    runs++;
    return new Promise<never>(() => undefined);
  };
  const first = await broker.start(OWNER, work, { externalId: "job-81" });
  const second = await broker.start(OWNER, work, { externalId: "job-81" });
  assert.equal(first, second);
  assert.equal(runs, 1);
  await broker.close();
});

test("work for a task that has gone is told to stop", { timeout: 10_000 }, async (t) => {
  const { broker } = await tools(t, refuse(410, { title: "The task has expired" }));
  const task = broker.task("a-ref");
  await assert.rejects(task.progress("half way"), { name: "Problem", status: 410 });
  assert.throws(() => task.signal.throwIfAborted(), { name: "CancelRequested" });
});
