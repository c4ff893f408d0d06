// A tool server that counts primes. Clients that understand tasks follow, cancel and answer its
// calls through Task Broker; all others wait for the plain result.
import { createServer } from "node:http";

import { localhostHostValidation, toNodeHandler } from "@modelcontextprotocol/node";
import {
  acceptedContent,
  CLIENT_CAPABILITIES_META_KEY,
  createMcpHandler,
  inputRequired,
  McpServer,
  type CallToolResult,
  type ClientCapabilities,
  type ServerContext,
} from "@modelcontextprotocol/server";
import { elicitation, ownerFrom, TaskBroker, textResult, type Work } from "taskbroker-sdk";
import * as z from "zod";

import { countPrimes, type Waiting } from "./primes.js";

const TASKS = "io.modelcontextprotocol/tasks";
const Limit = z.object({ limit: z.number().int().min(2).max(1e9) });
const QUESTIONS = {
  limit: elicitation("Below which number shall the primes be counted?", {
    type: "object",
    properties: { limit: { type: "integer", minimum: 2, maximum: 1e9 } },
    required: ["limit"],
  }),
};

const broker = TaskBroker.fromEnv();

function buildServer(): McpServer {
  const server = new McpServer(
    { name: "primes", version: "1.0.0" },
    { capabilities: { tools: {}, extensions: { [TASKS]: {} } } },
  );
  server.registerTool(
    "greet",
    { description: "Greets somebody, at once", inputSchema: z.object({ name: z.string() }) },
    ({ name }) => textResult(`Hello, ${name}!`),
  );
  server.registerTool(
    "count_primes",
    { description: "Counts the primes below a limit", inputSchema: Limit },
    ({ limit }, ctx) =>
      understandsTasks(ctx)
        ? asTask("count_primes", ctx, async (task) => textResult(await countPrimes(limit, task)))
        : countPrimes(limit, ctx.mcpReq).then(textResult),
  );
  server.registerTool("ask", { description: "Asks how far to count primes" }, (ctx) => {
    if (understandsTasks(ctx)) {
      return asTask("ask", ctx, async (task) => countAsAnswered(await task.ask(QUESTIONS), task));
    }
    const answers = ctx.mcpReq.inputResponses;
    return answers
      ? countAsAnswered(answers, ctx.mcpReq)
      : inputRequired({ inputRequests: QUESTIONS });
  });
  return server;
}

async function countAsAnswered(answers: Record<string, unknown>, waiting: Waiting) {
  const answer = acceptedContent(answers, "limit", Limit);
  if (!answer) return textResult("Without a limit there is nothing to count.", { isError: true });
  return textResult(await countPrimes(answer.limit, waiting));
}

function understandsTasks({ mcpReq }: ServerContext): boolean {
  const envelope: { [CLIENT_CAPABILITIES_META_KEY]?: ClientCapabilities } = mcpReq.envelope ?? {};
  return envelope[CLIENT_CAPABILITIES_META_KEY]?.extensions?.[TASKS] !== undefined;
}

/** Does the work in the background, and answers the call with the task that it is reported on. */
async function asTask(tool: string, ctx: ServerContext, work: Work): Promise<CallToolResult> {
  const owner = ownerFrom(ctx.http?.req?.headers);
  const task = await broker.start(owner, work, { tool, pollIntervalMs: 500, stallAfterMs: 5_000 });
  // The package has no type for results that are tasks, but it passes them on.
  return task.createTaskResult as unknown as CallToolResult;
}

const isLocal = localhostHostValidation();
const answer = toNodeHandler(createMcpHandler(buildServer));
const server = createServer((request, response) => {
  if (isLocal(request, response)) void answer(request, response);
});
const port = Number(process.env.PORT ?? 3000);
server.listen(port, "127.0.0.1", () => console.error(`http://127.0.0.1:${port}/mcp`));

for (const signal of ["SIGINT", "SIGTERM"]) {
  process.once(signal, async () => {
    await broker.close();
    process.exit();
  });
}
