// Drives the official Tasks client, `@modelcontextprotocol/ext-tasks` on `client` 2.4, against
// tasks that somebody else created: the client knows nothing but their ids.
//
// Standard input, one JSON object:
//   {"url": "http://…/mcp", "token": "…",
//    "tasks": {"completes": id, "asks": id, "cancels": id, "fails": id, "unknown": id}}
//
//   completes  working now, completed once this driver has said on standard error that it watches
//   asks       has one elicitation outstanding; ends when the answer has arrived
//   cancels    working; ends `cancelled` once the cancellation has been asked for
//   fails      ends `failed` with a JSON-RPC error
//   unknown    names no task of this caller
//
// Every member of `tasks` is optional. Prints one JSON summary, without any id; exit code 1 if a
// step could not be carried out.
import { Client, ProtocolError, StreamableHTTPClientTransport } from "@modelcontextprotocol/client";
import { createTaskSessionFromClient } from "@modelcontextprotocol/ext-tasks/client";

const PROTOCOL = "2026-07-28";
const EXTENSION = "io.modelcontextprotocol/tasks";
const PATIENCE_MS = 30_000;

const clientInfo = { name: "ext-tasks-driver", version: "1.0.0" };
const clientCapabilities = { elicitation: { form: {} }, extensions: { [EXTENSION]: {} } };

// The client has checked an answer's `resultType` when it hands it over, and removed it;
// ext-tasks checks it again. Whatever else the answer holds goes through untouched.
const anything = {
  "~standard": { version: 1, vendor: "driver", validate: (value) => ({ value }) },
};

function dispatchThrough(client) {
  return async (request, { signal, context } = {}) => {
    try {
      const result = await client.request(request, anything, {
        signal,
        headers: context?.headers,
        timeout: context?.requestTimeoutMs,
      });
      return { kind: "result", result: { ...result, resultType: "complete" } };
    } catch (error) {
      if (!(error instanceof ProtocolError)) throw error;
      const { code, message, data } = error;
      return { kind: "error", error: { code, message, ...(data === undefined ? {} : { data }) } };
    }
  };
}

async function connect(url, token) {
  const client = new Client(clientInfo, {
    capabilities: clientCapabilities,
    versionNegotiation: { mode: "auto" },
  });
  const authProvider = { token: async () => token };
  await client.connect(new StreamableHTTPClientTransport(new URL(url), { authProvider }));
  return client;
}

function openSession(client, onInputRequest) {
  return createTaskSessionFromClient(client, {
    endpointId: "broker",
    rawDispatch: dispatchThrough(client),
    v2RequestFraming: { protocolVersion: PROTOCOL, clientInfo, clientCapabilities },
    tools: { currentTool: () => undefined },
    onInputRequest,
  });
}

function resume(session, taskId) {
  const reference = { endpointId: session.endpointId, generation: "v2", taskId };
  return session.resumeTask({ ...reference, originalOperation: "tools/call" });
}

/** Follows a task to its end; says how it ended and every status on the way. */
async function follow(session, taskId) {
  const seen = [];
  const execution = await resume(session, taskId);
  const { outcome } = await execution.settle({
    signal: AbortSignal.timeout(PATIENCE_MS),
    onEvent: (event) => {
      const status = event.task?.status ?? event.outcome?.status;
      if (seen.at(-1) !== status) seen.push(status);
      if (event.task?.status === "working") console.error("watching");
    },
  });
  const { code, message, data } = outcome.error ?? {};
  return {
    seen,
    status: outcome.status,
    ...(outcome.status === "completed" ? { result: outcome.result } : {}),
    ...(outcome.status === "failed" ? { error: { code, message, data } } : {}),
  };
}

async function cancel(session, taskId) {
  const task = session.task(taskId);
  const before = await task.snapshot();
  await session.cancelTask(taskId);
  const outcome = await task.result({ signal: AbortSignal.timeout(PATIENCE_MS) });
  await session.cancelTask(taskId);
  return { seen: [before.status, outcome.status], status: outcome.status };
}

/** The same refusal is due to every method. */
async function refusals(session, taskId) {
  const task = session.task(taskId);
  const attempts = {
    get: () => task.snapshot(),
    update: () => task.updateJson({ answer: { action: "cancel" } }),
    cancel: () => task.cancel(),
    resume: () => resume(session, taskId),
  };
  const answers = {};
  for (const [name, attempt] of Object.entries(attempts)) {
    answers[name] = await attempt().then(
      () => "accepted",
      ({ name: kind, code, message }) => ({ kind, code, message }),
    );
  }
  return answers;
}

async function drive({ url, token, tasks }) {
  const questions = [];
  const client = await connect(url, token);
  const session = openSession(client, async (request) => {
    questions.push(request.params);
    const [[field, { enum: choices }]] = Object.entries(request.params.requestedSchema.properties);
    return { action: "accept", content: { [field]: choices?.[0] ?? "yes" } };
  });
  const summary = {
    era: client.getProtocolEra(),
    server: client.getServerVersion(),
    capabilities: client.getServerCapabilities(),
    execution: session.capabilities,
  };
  if (tasks.completes) summary.completes = await follow(session, tasks.completes);
  if (tasks.asks) summary.asks = { ...(await follow(session, tasks.asks)), questions };
  if (tasks.cancels) summary.cancels = await cancel(session, tasks.cancels);
  if (tasks.fails) summary.fails = await follow(session, tasks.fails);
  if (tasks.unknown) summary.unknown = await refusals(session, tasks.unknown);
  await session.close();
  await client.close();
  return summary;
}

async function readJson(stream) {
  const chunks = [];
  for await (const chunk of stream) chunks.push(chunk);
  return JSON.parse(Buffer.concat(chunks).toString("utf8"));
}

const input = await readJson(process.stdin);
try {
  console.log(JSON.stringify(await drive(input)));
} catch (error) {
  const secrets = [input.token, ...Object.values(input.tasks)];
  console.error(secrets.reduce((text, secret) => text.replaceAll(secret, "…"), error.stack));
  process.exitCode = 1;
}
