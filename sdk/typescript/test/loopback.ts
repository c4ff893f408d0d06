// A broker's stand-in on the loopback, for what a real one cannot be asked to do: to fail.
import { once } from "node:events";
import { createServer, type IncomingMessage, type ServerResponse } from "node:http";
import type { AddressInfo } from "node:net";
import type { TestContext } from "node:test";

import { TaskBroker, type TaskBrokerOptions } from "taskbroker-sdk";

export interface Received {
  method: string;
  url: string;
  headers: IncomingMessage["headers"];
  body: string;
}

/** Answers one request; what it returns is the body of a 200. */
export type Answer = (request: Received, response: ServerResponse) => object | void;

/** Answers the requests in turn, and all further ones as the last. */
export async function loopback(test: TestContext, ...answers: Answer[]) {
  const received: Received[] = [];
  const server = createServer(async (request, response) => {
    let body = "";
    for await (const chunk of request) body += chunk;
    const { method = "", url = "", headers } = request;
    received.push({ method, url, headers, body });
    const answer = answers[Math.min(received.length, answers.length) - 1];
    const said = answer?.(received.at(-1)!, response);
    if (said) response.end(JSON.stringify(said));
  });
  server.listen(0, "127.0.0.1");
  await once(server, "listening");
  test.after(() => {
    server.closeAllConnections();
    server.close();
  });
  return { url: `http://127.0.0.1:${(server.address() as AddressInfo).port}`, received };
}

export const SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
export const KEY = "tbk_0123456789abcdefghij";

export function brokerAt(url: string, options: Partial<TaskBrokerOptions> = {}): TaskBroker {
  return new TaskBroker({ url, backend: "tools", apiKey: KEY, webhookSecret: SECRET, ...options });
}

export const drop: Answer = (_request, response) => void response.destroy();

export const REFUSED = "urn:taskbroker:problem:refused";

/** The broker refuses, in its own words. */
export function refuse(status: number, document: object, headers = {}): Answer {
  return (_request, response) =>
    void response.writeHead(status, headers).end(JSON.stringify({ type: REFUSED, ...document }));
}

/** What stands in front of a broker says something of its own. */
export function page(status: number): Answer {
  return (_request, response) => void response.writeHead(status).end("<h1>not the broker</h1>");
}

/** The answer to an event. */
export function state(members: object = {}, signals: object = {}): object {
  return { applied: true, task: task(members), ...SIGNALS, ...signals };
}

/** The answer to a look. */
export function seen(signals: object = {}): object {
  return { ...task(), ...SIGNALS, ...signals };
}

const SIGNALS = { cancelRequested: false, inputResponses: {} };

function task(members: object = {}): object {
  return { taskRef: "a-ref", status: "working", ttlMs: null, ...members };
}
