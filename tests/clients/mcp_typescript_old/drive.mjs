// Drives the official TypeScript SDK before 2.0, `@modelcontextprotocol/sdk`, with the tasks of
// MCP 2025-11-25 that it has. `../drivers.py` describes the ticket and the summary.
import { writeFile } from "node:fs/promises";
import { json } from "node:stream/consumers";
import { Client } from "@modelcontextprotocol/sdk/client/index.js";
import { StreamableHTTPClientTransport } from "@modelcontextprotocol/sdk/client/streamableHttp.js";
import { CallToolResultSchema, ElicitRequestSchema } from "@modelcontextprotocol/sdk/types.js";

const clientInfo = { name: "sdk-1-driver", version: "1.0.0" };
const OVER = ["completed", "failed", "cancelled"];

async function connect(url, token, onQuestion) {
  const client = new Client(clientInfo, { capabilities: { elicitation: { form: {} } } });
  client.setRequestHandler(ElicitRequestSchema, onQuestion);
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  await client.connect(new StreamableHTTPClientTransport(new URL(url), { requestInit: { headers } }));
  if (client.getServerCapabilities().tools) await client.listTools(); // it learns which become tasks
  return client;
}

function verbs(client) {
  const { tasks } = client.experimental;

  async function start(tool, given) {
    const { value } = await tasks.callToolStream({ name: tool, arguments: given }).next();
    if (value.type !== "taskCreated") throw new Error(`${tool} did not become a task`);
    return value.task.taskId;
  }

  // Blocks until the task has ended; its questions come meanwhile.
  async function ending(task) {
    const result = await tasks.getTaskResult(task, CallToolResultSchema).then(said, failure);
    const { status, statusMessage } = await tasks.getTask(task);
    return { status, ...(status === "failed" && { error: { message: statusMessage } }), ...result };
  }

  async function resume({ task }) {
    for (;;) {
      const { status, pollInterval = 1000 } = await tasks.getTask(task);
      if (status === "input_required" || OVER.includes(status)) return ending(task);
      await new Promise((resolve) => setTimeout(resolve, pollInterval));
    }
  }

  async function withdraw({ task }) {
    const { status } = await tasks.cancelTask(task);
    return { status };
  }

  return {
    call: async ({ tool, arguments: given }) =>
      said(await client.callTool({ name: tool, arguments: given })),

    // The library polls, and asks for the result of what has completed or has a question. Of a task
    // that failed it tells no more than that, so its caller has to read why.
    follow: async ({ tool, arguments: given }) => {
      let task, outcome;
      for await (const message of tasks.callToolStream({ name: tool, arguments: given })) {
        task = message.task ?? task;
        if (message.type === "result") outcome = said(message.result);
      }
      const { status, statusMessage } = await tasks.getTask(task.taskId);
      return { status, ...(outcome ?? { error: { message: statusMessage } }) };
    },

    wait: async ({ tool, arguments: given }) => ending(await start(tool, given)),

    cancel: async ({ tool, arguments: given }) => withdraw({ task: await start(tool, given) }),

    leave: async ({ tool, arguments: given, file }) => {
      await writeFile(file, await start(tool, given));
      return {};
    },

    resume,

    withdraw,

    probe: async ({ task }) => ({
      get: await codeOf(tasks.getTask(task)),
      result: await codeOf(tasks.getTaskResult(task, CallToolResultSchema)),
      cancel: await codeOf(tasks.cancelTask(task)),
    }),

    find: async ({ task }) => {
      let pages = 0;
      let found = false;
      let cursor;
      do {
        const page = await tasks.listTasks(cursor);
        pages += 1;
        found ||= page.tasks.some(({ taskId }) => taskId === task);
        cursor = page.nextCursor;
      } while (cursor);
      return { pages, found };
    },
  };
}

function said({ content, isError = false }) {
  return { text: content.map((block) => block.text ?? "").join(""), isError };
}

function failure({ code, message }) {
  return { error: { code, message: message.replace(`MCP error ${code}: `, "") } };
}

function codeOf(attempt) {
  return attempt.then(
    () => null,
    (refused) => refused.code,
  );
}

async function drive({ url, token, acts }) {
  const asked = [];
  const client = await connect(url, token, ({ params }) => {
    asked.push(params.message);
    const fields = Object.entries(params.requestedSchema.properties);
    const answers = fields.map(([name, { type }]) => [name, type === "boolean" || "Ada"]);
    return { action: "accept", content: Object.fromEntries(answers) };
  });
  const play = verbs(client);
  const outcomes = {};
  for (const [name, act] of Object.entries(acts)) {
    const outcome = await play[act.verb](act);
    outcomes[name] = { ...outcome, asked: asked.splice(0) };
  }
  await client.close();
  return outcomes;
}

console.log(JSON.stringify(await drive(await json(process.stdin))));
