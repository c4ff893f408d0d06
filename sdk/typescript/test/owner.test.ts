import assert from "node:assert/strict";
import { test } from "node:test";

import { elicitation, ownerFrom, textResult } from "taskbroker-sdk";

test("the gateway's handle comes before the client's own credential", () => {
  const both = { "task-owner": "a.handle", authorization: "Bearer token" };
  assert.deepEqual(ownerFrom(both), { handle: "a.handle" });
  assert.deepEqual(ownerFrom({ authorization: "Bearer token" }), { authorization: "Bearer token" });
  assert.deepEqual(ownerFrom({ accept: "*/*" }), { anonymous: true });
  assert.deepEqual(ownerFrom(), { anonymous: true });
});

test("headers may be anything that has names and values, in any case", () => {
  const owner = { handle: "a.handle" };
  assert.deepEqual(ownerFrom(new Headers({ "Task-Owner": "a.handle" })), owner);
  assert.deepEqual(ownerFrom(new Map([["TASK-OWNER", "a.handle"]])), owner);
  assert.deepEqual(ownerFrom({ "Task-Owner": ["a.handle"] }), owner);
  assert.deepEqual(ownerFrom({ "task-owner": "", Authorization: undefined }), { anonymous: true });
});

test("results and questions have the shapes of MCP", () => {
  assert.deepEqual(textResult("Hello"), { content: [{ type: "text", text: "Hello" }] });
  assert.equal(textResult("no luck", { isError: true }).isError, true);
  const schema = { type: "object" as const, properties: {} };
  assert.deepEqual(elicitation("Which size?", schema), {
    method: "elicitation/create",
    params: { mode: "form", message: "Which size?", requestedSchema: schema },
  });
});
