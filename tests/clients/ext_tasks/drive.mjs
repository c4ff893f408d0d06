// Drives the official Tasks client, `@modelcontextprotocol/ext-tasks` on `client` 2.4.
// `../drivers.py` describes the ticket and the summary.
//
//     node drive.mjs [VERSION]      with a version of 2025: as a client that speaks no other
import { appendFileSync } from "node:fs";
import { writeFile } from "node:fs/promises";
import { json } from "node:stream/consumers";
import { Client, StreamableHTTPClientTransport } from "@modelcontextprotocol/client";
import { createTaskSessionFromClient } from "@modelcontextprotocol/ext-tasks/client";

const PROTOCOL = "2026-07-28";
const EXTENSION = "io.modelcontextprotocol/tasks";
const TERMINAL = new Set(["completed", "failed", "cancelled"]);

const [VERSION_OF_2025] = process.argv.slice(2);
const NEGOTIATION = VERSION_OF_2025
  ? { versionNegotiation: { mode: "legacy" }, supportedProtocolVersions: [VERSION_OF_2025] }
  : { versionNegotiation: { mode: "auto" } };

const clientInfo = { name: "ext-tasks-driver", version: "1.0.0" };
const clientCapabilities = { elicitation: { form: {} }, extensions: { [EXTENSION]: {} } };

// The client refuses results that are tasks, so ext-tasks has the application send what is about
// tasks itself: here over the client's own transport, with ids of its own. (The transport sets the
// headers.)
function dispatchOver(transport) {
  const waiting = new Map();
  const toClient = transport.onmessage;
  transport.onmessage = (message, extra) => {
    const receive = waiting.get(message.id) ?? toClient;
    receive(message, extra);
  };
  let sent = 0;
  return async (request, { signal, context } = {}) => {
    const id = `dispatch-${++sent}`;
    const answered = new Promise((resolve) => waiting.set(id, resolve));
    try {
      const options = { requestSignal: signal, headers: context?.headers };
      await transport.send({ jsonrpc: "2.0", id, ...request }, options);
      const { result, error } = await answered;
      return error ? { kind: "error", error } : { kind: "result", result };
    } finally {
      waiting.delete(id);
    }
  };
}

async function connect(url, token) {
  const client = new Client(clientInfo, { capabilities: clientCapabilities, ...NEGOTIATION });
  const authProvider = token ? { token: async () => token } : undefined;
  const transport = new StreamableHTTPClientTransport(new URL(url), { authProvider });
  await client.connect(transport);
  return { client, dispatch: dispatchOver(transport) };
}

function openSession({ client, dispatch }, onInputRequest) {
  return createTaskSessionFromClient(client, {
    endpointId: "broker",
    rawDispatch: dispatch,
    v2RequestFraming: { protocolVersion: PROTOCOL, clientInfo, clientCapabilities },
    onInputRequest,
  });
}

function verbs(session, { client, dispatch }) {
  const legacy = client.getProtocolEra() === "legacy";

  async function start(tool, toolArguments) {
    const execution = await session.callTool(tool, toolArguments, { task: { preference: "prefer" } });
    if (execution.kind !== "task") throw new Error(`${tool} did not become a task`);
    return execution;
  }

  function resume({ task }) {
    const generation = legacy ? "v1" : "v2";
    const reference = { endpointId: session.endpointId, generation, taskId: task };
    return session.resumeTask({ ...reference, originalOperation: "tools/call" });
  }

  function result(task) {
    return dispatch({ method: "tasks/result", params: { taskId: task } });
  }

  // Of 2025-11-25 the library does nothing but poll. Questions come to who waits for the result.
  function settle(execution) {
    let waits = !legacy;
    return settled(execution, ({ type, task }) => {
      if (waits || type !== "task" || task.status !== "input_required") return;
      waits = true;
      void result(task.taskId);
    });
  }

  return {
    call: async ({ tool, arguments: given }) => settle(await session.callTool(tool, given)),

    follow: async ({ tool, arguments: given }) => settle(await start(tool, given)),

    wait: async ({ tool, arguments: given }) => {
      const execution = await start(tool, given);
      await result(execution.handle.taskId);
      return settle(execution);
    },

    cancel: async ({ tool, arguments: given }) => {
      const execution = await start(tool, given);
      await execution.cancel();
      return settle(execution);
    },

    leave: async ({ tool, arguments: given, file }) => {
      const execution = await start(tool, given);
      await execution.handoff(({ taskId }) => writeFile(file, taskId));
      return {};
    },

    resume: async ({ task }) => settle(await resume({ task })),

    withdraw: async ({ task }) => {
      await session.cancelTask(task);
      return settle(await resume({ task }));
    },

    // The client opens the stream, and ext-tasks takes from it what is about tasks that it follows
    // already. (The task's long interval keeps it from polling.)
    listen: async ({ task, file }) => {
      const told = [];
      tellOfTasks(client, (status) => {
        told.push(status);
        appendFileSync(file, `${status}\n`);
      });
      const resumed = resume({ task });
      const outcome = resumed.then(settle);
      outcome.catch(() => undefined); // it may have none while the stream is there
      await resumed.catch(() => undefined);
      try {
        const subscription = await client.listen({ taskIds: [task] });
        const end = await subscription.closed;
        const status = told.at(-1);
        return { end, ...(TERMINAL.has(status) ? await outcome : { status }) };
      } catch (refused) {
        return { end: refused.status ?? refused.code };
      }
    },

    probe: async ({ task }) => {
      const controller = session.task(task);
      return {
        get: await codeOf(controller.snapshot()),
        ...(legacy
          ? { result: (await result(task)).error?.code ?? null }
          : { update: await codeOf(controller.updateJson({})) }),
        cancel: await codeOf(controller.cancel()),
      };
    },

    find: async ({ task }) => {
      let pages = 0;
      let found = false;
      let cursor;
      do {
        const page = await session.listTasks(cursor);
        pages += 1;
        found ||= page.tasks.some(({ taskId }) => taskId === task);
        cursor = page.nextCursor;
      } while (cursor);
      return { pages, found };
    },
  };
}

function tellOfTasks(client, tell) {
  const toSession = client.fallbackNotificationHandler;
  client.fallbackNotificationHandler = async (notification) => {
    if (notification.method === "notifications/tasks") tell(notification.params.status);
    await toSession(notification);
  };
}

async function settled(execution, onEvent) {
  const { outcome } = await execution.settle({ onEvent });
  const { status, result, error } = outcome;
  if (status !== "completed") {
    return { status, error: error && { code: error.code, message: error.message } };
  }
  const text = result.content.map((block) => block.text ?? "").join("");
  return { status, text, isError: result.isError ?? false };
}

function codeOf(attempt) {
  return attempt.then(
    () => null,
    (refused) => refused.code,
  );
}

async function drive({ url, token, acts }) {
  const asked = [];
  const connection = await connect(url, token);
  const session = openSession(connection, async ({ params }) => {
    asked.push(params.message);
    const fields = Object.entries(params.requestedSchema.properties);
    const answers = fields.map(([name, { type }]) => [name, type === "boolean" || "Ada"]);
    return { action: "accept", content: Object.fromEntries(answers) };
  });
  const play = verbs(session, connection);
  const outcomes = {};
  for (const [name, act] of Object.entries(acts)) {
    const outcome = await play[act.verb](act);
    outcomes[name] = { ...outcome, asked: asked.splice(0) };
  }
  await session.close();
  await connection.client.close();
  return outcomes;
}

console.log(JSON.stringify(await drive(await json(process.stdin))));
