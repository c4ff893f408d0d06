import { randomUUID } from "node:crypto";
import { setTimeout as sleep } from "node:timers/promises";

import { BrokerError, Problem, Unreachable } from "./errors.js";
import { pauseMs, worthRetrying } from "./retries.js";
import { sign, signingKey } from "./signing.js";
import type { Created, NewTask, Owner, TaskEvent, TaskState } from "./wire.js";

export interface ConnectionOptions {
  /** Where the broker is, as `https://broker.example`. */
  url: string;
  /** The name that the tool server is registered under. */
  backend: string;
  /** `tbk_…` */
  apiKey: string;
  /** `whsec_…`: events are signed with it; without it they carry the API key. */
  webhookSecret?: string;
  /** How often a request is tried before `Unreachable`; 8 unless set. */
  attempts?: number;
  /** How long one attempt may take; 10 000 unless set. */
  timeoutMs?: number;
}

interface Request {
  method: "GET" | "POST";
  path: string;
  body?: string;
  /** Called for each attempt: a signature is fresh or it is worth nothing. */
  headers: () => Record<string, string>;
}

interface Failure {
  what: string;
  retryAfter: string | null;
  cause?: unknown;
}

type Page = { tasks: TaskState[]; nextCursor?: string };
type Reply = Pick<TaskState, "cancelRequested" | "inputResponses" | "applied" | "reason"> & {
  task: TaskState;
};

/** The requests that a tool server makes to its broker, tried again for as long as that helps. */
export class Connection {
  readonly url: string;
  readonly backend: string;
  readonly #apiKey: string;
  readonly #webhookSecret: string | undefined;
  readonly #attempts: number;
  readonly #timeoutMs: number;
  readonly #underWay = new Set<AbortController>();
  #closed = false;

  constructor(options: ConnectionOptions) {
    this.url = checkedUrl(options.url);
    this.backend = options.backend;
    this.#apiKey = options.apiKey;
    this.#webhookSecret = options.webhookSecret;
    this.#attempts = options.attempts ?? 8;
    this.#timeoutMs = options.timeoutMs ?? 10_000;
    if (!this.backend) throw new BrokerError("The name of the backend is empty.");
    // fetch would quote the whole header in its complaint.
    if (!/^[\x21-\x7e]+$/.test(this.#apiKey)) throw new BrokerError("The API key is malformed.");
    if (this.#webhookSecret !== undefined) signingKey(this.#webhookSecret);
  }

  create(owner: Owner, task: NewTask): Promise<Created> {
    const body = toJson({ owner, ...task });
    return this.#send({ method: "POST", path: "/v1/tasks", body, headers: () => this.#bearer() });
  }

  read(taskRef: string): Promise<TaskState> {
    return this.#get(`/v1/tasks/${encodeURIComponent(taskRef)}`);
  }

  list(query: Record<string, string>): Promise<Page> {
    return this.#get(`/v1/tasks?${new URLSearchParams(query)}`);
  }

  /** Reports an event. Each attempt carries the same `webhook-id`, so it is applied once. */
  async report(taskRef: string, event: TaskEvent): Promise<TaskState> {
    const timestamp = new Date().toISOString();
    const body = toJson({ type: "task.updated", timestamp, data: { taskRef, ...event } });
    const webhookId = `msg_${randomUUID()}`;
    const { task, ...signals } = await this.#send<Reply>({
      method: "POST",
      path: `/v1/webhooks/${encodeURIComponent(this.backend)}`,
      body,
      headers: () => ({ "webhook-id": webhookId, ...this.#signature(webhookId, body) }),
    });
    return { ...task, ...signals };
  }

  /** Gives up whatever is under way, and takes no more. */
  close(): void {
    this.#closed = true;
    for (const waiting of this.#underWay) waiting.abort();
  }

  #get<Answer>(path: string): Promise<Answer> {
    return this.#send({ method: "GET", path, headers: () => this.#bearer() });
  }

  #bearer(): Record<string, string> {
    return { authorization: `Bearer ${this.#apiKey}` };
  }

  #signature(webhookId: string, body: string): Record<string, string> {
    if (this.#webhookSecret === undefined) return this.#bearer();
    const now = Math.floor(Date.now() / 1000);
    return {
      "webhook-timestamp": `${now}`,
      "webhook-signature": sign(this.#webhookSecret, webhookId, now, body),
    };
  }

  async #send<Answer>(request: Request): Promise<Answer> {
    for (let attempt = 1; ; attempt++) {
      if (this.#closed) throw closed();
      const outcome = await this.#attempt<Answer>(request);
      if ("answer" in outcome) return outcome.answer;
      if (this.#closed) throw closed();
      if (attempt >= this.#attempts) {
        const last = `the last one: ${outcome.what}`;
        throw new Unreachable(`The broker could not be reached in ${attempt} attempts; ${last}`, {
          cause: outcome.cause,
        });
      }
      await this.#pause(pauseMs(attempt, outcome.retryAfter, Math.random()));
    }
  }

  async #attempt<Answer>(request: Request): Promise<{ answer: Answer } | Failure> {
    const abort = new AbortController();
    const timer = setTimeout(() => abort.abort(new Error("it took too long")), this.#timeoutMs);
    this.#underWay.add(abort);
    try {
      return await this.#exchange<Answer>(request, abort.signal);
    } catch (error) {
      if (error instanceof BrokerError) throw error;
      return { what: describe(error), retryAfter: null, cause: error };
    } finally {
      clearTimeout(timer);
      this.#underWay.delete(abort);
    }
  }

  async #exchange<Answer>(
    { method, path, body, headers }: Request,
    signal: AbortSignal,
  ): Promise<{ answer: Answer } | Failure> {
    const response = await fetch(this.url + path, {
      method,
      body,
      headers: { "content-type": "application/json", ...headers() },
      redirect: "manual",
      signal,
    });
    const document = objectIn(await response.text());
    if (response.ok) {
      if (document) return { answer: document as Answer };
      throw new BrokerError("The answer is no JSON object; does the URL lead to a broker?");
    }
    const problem = new Problem(response.status, { ...document });
    if (!worthRetrying(response.status)) throw problem;
    const retryAfter = response.headers.get("retry-after");
    return { what: `${response.status} ${problem.message}`, retryAfter, cause: problem };
  }

  async #pause(ms: number): Promise<void> {
    const abort = new AbortController();
    this.#underWay.add(abort);
    await sleep(ms, undefined, { signal: abort.signal }).catch(() => undefined);
    this.#underWay.delete(abort);
  }
}

function closed(): BrokerError {
  return new BrokerError("The connection to the broker was closed.");
}

function checkedUrl(text: string): string {
  const url = URL.canParse(text) ? new URL(text) : undefined;
  if (!url || !/^https?:$/.test(url.protocol) || url.username || url.password || url.search) {
    throw new BrokerError("The broker's URL must be http(s)://host[:port][/path], and no more.");
  }
  return url.href.replace(/\/+$/, "");
}

/** JSON, of what JSON can say: a number that is none would silently become `null`. */
function toJson(value: unknown): string {
  return JSON.stringify(value, (member, part: unknown) => {
    if (typeof part === "number" && !Number.isFinite(part)) {
      throw new BrokerError(`JSON has no ${part}; it stands in "${member}".`);
    }
    return part;
  });
}

function objectIn(text: string): object | undefined {
  try {
    const value: unknown = JSON.parse(text);
    return typeof value === "object" && value !== null ? value : undefined;
  } catch {
    return undefined;
  }
}

/** Why there was no answer; fetch hides it in the cause. */
function describe(error: unknown): string {
  const { message, cause } = error as Error & { cause?: { code?: string; message?: string } };
  return cause?.code ?? cause?.message ?? message;
}
