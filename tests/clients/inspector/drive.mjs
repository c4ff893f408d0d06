// Drives `mcpdo`, the command line of the MCP Inspector. `../drivers.py` describes the ticket and
// the summary.
//
//     node drive.mjs ERA            "legacy" or "modern"
//
// Its commands go to a daemon that holds the connection; each driver has a daemon of its own. It
// takes the id of a task on the command line only, where other users of the machine can see it.
import { execFile } from "node:child_process";
import { mkdtemp, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import path from "node:path";
import { json } from "node:stream/consumers";
import { promisify } from "node:util";

const [ERA] = process.argv.slice(2);
const MCPDO = path.join(import.meta.dirname, "node_modules/.bin/mcpdo");
const POLL_MS = 200;

// What `mcpdo` shows: a JSON document on standard output, or why not on standard error.
function commandsIn(folder) {
  const own = { HOME: folder, MCP_STORAGE_DIR: folder, MCP_INSPECTOR_DAEMON_DIR: folder };
  const env = {
    ...process.env,
    ...own,
    MCP_INSPECTOR_DAEMON_TOKEN: "of-this-driver",
    MCP_INSPECTOR_SECRET_STORE: "file",
    NODE_COMPILE_CACHE: path.join(folder, "compiled"), // each command loads the same large program
  };
  return async (...words) => {
    const command = [MCPDO, "--format", "json", ...words];
    const run = promisify(execFile)(process.execPath, command, { env });
    const { stdout, stderr } = await run.catch((failed) => failed);
    return stdout ? JSON.parse(stdout) : problemIn(stderr);
  };
}

function problemIn(complaint) {
  const line = complaint.split("\n").find((each) => each.startsWith('{"error"'));
  if (!line) throw new Error(complaint);
  return JSON.parse(line);
}

async function connect(mcpdo, folder, url, token) {
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  const server = { type: "streamable-http", url, headers, protocolEra: ERA };
  const config = path.join(folder, "mcp.json");
  await writeFile(config, JSON.stringify({ mcpServers: { broker: server } }), { mode: 0o600 });
  const { error, protocolEra } = await mcpdo("--config", config, "connect", "broker");
  if (error) throw new Error(error.message);
  if (protocolEra !== ERA) throw new Error(`connected in the era ${protocolEra}`);
}

function verbs(mcpdo, asked) {
  async function view(task) {
    const { task: seen, error } = await mcpdo("tasks/get", task);
    if (error) throw new Error(error.message);
    return seen;
  }

  async function answer(task, inputRequests) {
    const answers = Object.entries(inputRequests).map(([key, { params }]) => {
      asked.push(params.message);
      const fields = Object.entries(params.requestedSchema.properties);
      const filled = fields.map(([name, { type }]) => [name, type === "boolean" || "Ada"]);
      return [key, { action: "accept", content: Object.fromEntries(filled) }];
    });
    const responses = JSON.stringify(Object.fromEntries(answers));
    await mcpdo("tasks/update", task, "--input-responses", responses);
  }

  async function resume({ task }) {
    for (;;) {
      const { status, raw } = await view(task);
      if (status === "input_required") await answer(task, raw.inputRequests);
      else if (status !== "working") return { status, ...said(await mcpdo("tasks/result", task)) };
      else await new Promise((resolve) => setTimeout(resolve, POLL_MS));
    }
  }

  async function call(tool, given, ...options) {
    const command = ["tools/call", ...options, tool, "--tool-args-json", JSON.stringify(given)];
    return said(await mcpdo(...command));
  }

  return {
    call: ({ tool, arguments: given }) => call(tool, given),

    follow: ({ tool, arguments: given }) => call(tool, given, "--task"),

    resume,

    withdraw: async ({ task }) => {
      await mcpdo("tasks/cancel", task);
      return resume({ task });
    },

    find: async ({ task }) => {
      const { tasks } = await mcpdo("tasks/list");
      return { found: tasks.some(({ taskId }) => taskId === task) };
    },

    tools: async () => {
      const { tools } = await mcpdo("tools/list");
      const offered = tools.map(({ name, execution }) => [name, execution?.taskSupport ?? null]);
      return { tools: Object.fromEntries(offered) };
    },
  };
}

function said({ content, isError = false, error }) {
  if (error) return { error: { message: error.message } };
  return { text: content.map((block) => block.text ?? "").join(""), isError };
}

async function drive({ url, token, acts }, folder) {
  const run = commandsIn(folder);
  const mcpdo = (command, ...words) => run("--connection", "broker", command, ...words);
  const asked = [];
  const outcomes = {};
  process.once("SIGTERM", () => run("daemon", "stop").finally(() => process.exit(1)));
  try {
    await connect(run, folder, url, token);
    const play = verbs(mcpdo, asked);
    for (const [name, act] of Object.entries(acts)) {
      const outcome = await play[act.verb](act);
      outcomes[name] = { ...outcome, asked: asked.splice(0) };
    }
  } finally {
    await run("daemon", "stop");
  }
  return outcomes;
}

const folder = await mkdtemp(path.join(tmpdir(), "mcpdo-"));
try {
  console.log(JSON.stringify(await drive(await json(process.stdin), folder)));
} finally {
  await rm(folder, { recursive: true, maxRetries: 3 });
}
