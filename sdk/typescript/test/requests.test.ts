import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { test } from "node:test";
import { inspect } from "node:util";

import { BrokerError, Problem, sign, TaskBroker, textResult, Unreachable } from "taskbroker-sdk";

import { pauseMs } from "../dist/retries.js";
import {
  brokerAt,
  drop,
  KEY,
  loopback,
  page,
  REFUSED,
  refuse,
  SECRET,
  seen,
  state,
} from "./loopback.js";

const RESULT = textResult("done");

test("signs as Standard Webhooks has it", () => {
  const body = '{"test": 2432232314}';
  const signature = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=";
  assert.equal(sign(SECRET, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, body), signature);
  const bytes = new TextEncoder().encode(body);
  assert.equal(sign(SECRET, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, bytes), signature);
});

test("waits twice as long after each attempt, with jitter, and as long as it is asked to", () => {
  const pauses = [1, 2, 3, 4, 5, 6, 7, 8].map((attempt) => pauseMs(attempt, null, 0));
  assert.deepEqual(pauses, [200, 400, 800, 1_600, 3_200, 6_400, 10_000, 10_000]);
  assert.equal(pauseMs(1, null, 1), 100);
  assert.equal(pauseMs(1, "3", 0), 3_000);
  assert.equal(pauseMs(7, "3", 0), 10_000);
  assert.equal(pauseMs(1, "86400", 0), 60_000);
  assert.equal(pauseMs(1, "9".repeat(400), 0), 60_000);
  assert.equal(pauseMs(1, "Wed, 21 Oct 2026 07:28:00 GMT", 0), 200);
});

test("sends an event again under its webhook-id, signed afresh", async (t) => {
  const unavailable = refuse(503, { title: "Unavailable" }, { "retry-after": "1" });
  const broker = await loopback(t, drop, unavailable, () => state());

  const reply = await brokerAt(broker.url).task("a-ref").report({
    statusMessage: "half way – ½",
  });

  assert.equal(reply.applied, true);
  assert.equal(reply.status, "working");
  const [first, second, third] = broker.received;
  assert(first && second && third && broker.received.length === 3);
  assert.equal(first.url, "/v1/webhooks/tools");
  const { type, data } = JSON.parse(first.body);
  assert.deepEqual(
    { type, data },
    {
      type: "task.updated",
      data: { taskRef: "a-ref", statusMessage: "half way – ½" },
    },
  );
  for (const { headers, body } of broker.received) {
    const { "webhook-id": id, "webhook-timestamp": timestamp } = headers;
    assert.equal(body, first.body);
    assert.equal(id, first.headers["webhook-id"]);
    assert.equal(headers["webhook-signature"], sign(SECRET, `${id}`, Number(timestamp), body));
    assert.equal(headers.authorization, undefined);
  }
  const [early, late] = [second, third].map(({ headers }) => Number(headers["webhook-timestamp"]));
  assert(late! > early!);
});

test("without a webhook secret, events carry the API key", async (t) => {
  const broker = await loopback(t, () => state());
  await brokerAt(broker.url, { webhookSecret: undefined }).task("a-ref").progress("half way");
  const { headers } = broker.received[0]!;
  assert.equal(headers.authorization, `Bearer ${KEY}`);
  assert.match(headers["webhook-id"] as string, /^msg_/);
  assert.equal(headers["webhook-signature"], undefined);
});

test("a create that is tried again has the same external id", async (t) => {
  const created = { taskRef: "a-ref", createTaskResult: { taskId: "an-id", status: "working" } };
  const broker = await loopback(t, drop, () => created);
  const task = await brokerAt(broker.url).create({ anonymous: true }, { tool: "greet" });
  assert.equal(task.createTaskResult.taskId, "an-id");
  const [first, second] = broker.received.map(({ body }) => JSON.parse(body));
  assert.deepEqual(first, second);
  assert.equal(typeof first.externalId, "string");
});

test("a refusal is not tried again, and says what is wrong where", async (t) => {
  const document = {
    title: "The input does not fit",
    detail: "Unknown status.",
    errors: [{ pointer: "/data/status", detail: "must be one of working, completed" }],
  };
  const broker = await loopback(t, refuse(422, document));
  const refused = brokerAt(broker.url).task("a-ref").report({ status: "completed" });
  await assert.rejects(refused, (problem) => {
    assert(problem instanceof Problem);
    assert.equal(problem.status, 422);
    assert.deepEqual(problem.errors, document.errors);
    assert.deepEqual(problem.document, { type: REFUSED, ...document });
    const said = "Unknown status. [/data/status: must be one of working, completed]";
    return problem.message === `The input does not fit: ${said}`;
  });
  assert.equal(broker.received.length, 1);
});

for (const status of [401, 404, 410]) {
  test(`a ${status} that is not the broker's is not believed`, async (t) => {
    const foreign = refuse(status, { type: "about:blank" });
    const broker = await loopback(t, page(status), foreign, () => state());
    const reply = await brokerAt(broker.url).task("a-ref").complete(RESULT);
    assert.equal(reply.applied, true);
    assert.equal(broker.received.length, 3);
  });
}

for (const answer of [
  {},
  [],
  { taskRef: "a-ref" },
  { taskRef: "a-ref", status: "working" },
  { taskRef: "a-ref", createTaskResult: null },
  { taskRef: "a-ref", createTaskResult: { taskId: "an-id" } },
]) {
  test(`what is no broker's answer is not believed: ${JSON.stringify(answer)}`, async (t) => {
    const { url } = await loopback(t, () => answer);
    const broker = brokerAt(url, { attempts: 1 });
    const message = /the last one: 200 OK, not a broker's answer; is the URL right\?$/;
    const refused = { name: "Unreachable", message };
    await assert.rejects(broker.create({ anonymous: true }), refused);
    await assert.rejects(broker.task("a-ref").read(), refused);
    await assert.rejects(broker.task("a-ref").complete(RESULT), refused);
    await assert.rejects(broker.find("job-81"), refused);
  });
}

test("says who it is, in the version of the package", async (t) => {
  const { url, received } = await loopback(t, () => seen());
  await brokerAt(url).task("a-ref").read();
  const { version } = createRequire(import.meta.url)("../package.json");
  assert.equal(received[0]?.headers["user-agent"], `taskbroker-sdk-typescript/${version}`);
});

test("a redirect is not followed: the key would go with it", async (t) => {
  const elsewhere = await loopback(t, () => state());
  const broker = await loopback(t, refuse(307, { type: "about:blank" }, { location: elsewhere.url }));
  const refused = brokerAt(broker.url, { attempts: 1 }).task("a-ref").read();
  await assert.rejects(refused, { name: "Unreachable", message: /307 Temporary Redirect/ });
  assert.equal(elsewhere.received.length, 0);
});

test("gives up after the last attempt, and names neither key nor secret", async (t) => {
  const broker = await loopback(t, drop, refuse(500, { title: "Internal error" }));
  const broken = brokerAt(broker.url, { attempts: 2 }).task("a-ref").complete(RESULT);
  await assert.rejects(broken, (error) => {
    assert(error instanceof Unreachable && error instanceof BrokerError);
    const said = "to POST /v1/webhooks/tools in 2 attempts; the last one: Internal error";
    assert.equal(error.message, `No usable answer ${said}`);
    return noSecretIn(inspect(error, { depth: 9 }));
  });
});

test("an attempt that takes too long is one that failed", async (t) => {
  const silent = () => undefined;
  const broker = await loopback(t, silent, () => state());
  const reply = await brokerAt(broker.url, { timeoutMs: 200 }).task("a-ref").complete(RESULT);
  assert.equal(reply.status, "working");
  assert(broker.received.length >= 2);
});

test("a closed broker gives up what is under way", async (t) => {
  const broker = await loopback(t, refuse(503, {}, { "retry-after": "30" }));
  const tools = brokerAt(broker.url);
  const waiting = assert.rejects(tools.task("a-ref").read(), /client is closed/);
  await tools.close();
  await waiting;
  await assert.rejects(tools.create({ anonymous: true }), /client is closed/);
});

test("what JSON cannot say is refused before it is sent", async () => {
  const result = { content: [], structuredContent: { mean: NaN } };
  const refused = brokerAt("http://127.0.0.1:9").task("a-ref").complete(result);
  const message = /cannot be sent as JSON.*NaN.*"mean"/;
  await assert.rejects(refused, { name: "TypeError", message });
});

test("shows no secret, however it is looked at", async (t) => {
  const createTaskResult = { taskId: "secret-id", status: "working" };
  const created = { taskRef: "a-ref", createTaskResult };
  const broker = await loopback(t, () => created);
  const tools = brokerAt(broker.url);
  const task = await tools.create({ authorization: "Bearer secret-token" });
  for (const value of [tools, task]) {
    const seen = inspect(value, { depth: 9, showHidden: true }) + JSON.stringify(value);
    assert(noSecretIn(seen), seen);
  }
});

function noSecretIn(text: string): boolean {
  return ![KEY, SECRET, SECRET.slice(6), "secret-id", "secret-token"].some((s) => text.includes(s));
}

test("the environment configures it; what is missing is named", () => {
  const environment = {
    BROKER_URL: "http://broker.example/base/",
    BROKER_BACKEND: "tools",
    BROKER_API_KEY: KEY,
    BROKER_WEBHOOK_SECRET: "",
  };
  const broker = TaskBroker.fromEnv({}, environment);
  assert.deepEqual([broker.url, broker.backend], ["http://broker.example/base", "tools"]);
  assert.throws(() => TaskBroker.fromEnv({}, { BROKER_BACKEND: "tools" }), {
    name: "TypeError",
    message: /^not set: BROKER_URL, BROKER_API_KEY\. `taskbroker backend add NAME`/,
  });
});

test("bad settings are refused at once, without quoting them", () => {
  const refused: [Parameters<typeof brokerAt>[1], RegExp][] = [
    [{ url: "broker.example" }, /url must look like/],
    [{ url: "http://broker.example:65536" }, /url must look like/],
    [{ url: "https://user:hunter2@broker.example" }, /no user name/],
    [{ url: "https://broker.example/#hunter2" }, /no fragment/],
    [{ backend: "" }, /backend is empty/],
    [{ apiKey: "tbk_\nhunter2" }, /a line break/],
    [{ webhookSecret: "hunter2" }, /whsec_ and base64/],
    [{ webhookSecret: SECRET.slice("whsec_".length) }, /whsec_ and base64/],
    [{ webhookSecret: "whsec_hunter2" }, /whsec_ and base64/],
    [{ attempts: 0 }, /attempts must be/],
    [{ heartbeatMs: 0 }, /heartbeatMs must be/],
  ];
  for (const [options, message] of refused) {
    assert.throws(
      () => brokerAt("http://127.0.0.1:9", options),
      (error: Error) =>
        error instanceof TypeError &&
        message.test(error.message) &&
        !error.message.includes("hunter2"),
    );
  }
});
