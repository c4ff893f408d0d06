import { randomUUID } from "node:crypto";
import { STATUS_CODES } from "node:http";
import { setTimeout as sleep } from "node:timers/promises";

import { BrokerError, closed, Problem, Unreachable } from "./errors.js";
import { pauseMs, worthRetrying } from "./retries.js";
import { sign, signingKey } from "./signing.js";
import { VERSION } from "./version.js";
import {
  isCreated,
  isPage,
  isProblem,
  isReply,
  isTaskState,
  type Created,
  type NewTask,
  type Owner,
  type Page,
  type TaskEvent,
  type TaskState,
} from "./wire.js";

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

/** One request, however often it is sent. */
export interface Request {
  method: "GET" | "POST";
  path: string;
  body?: string;
  /** Makes every repetition of an event the same event. */
  webhookId?: string;
}

/** How far to go for an answer. */
export interface Patience {
  /** As of the connection unless set. */
  attempts?: number;
  /** Ends the waiting, by its reason. */
  signal?: AbortSignal;
}

interface Failure {
  what: string;
  retryAfter: string | null;
  cause?: unknown;
}

type Shape<Answer> = (answer: unknown) => answer is Answer;

/** The requests that a tool server makes to its broker, tried again for as long as that helps. */
export class Connection {
  readonly url: string;
  readonly backend: string;
  readonly #apiKey: string;
  readonly #webhookSecret: string | undefined;
  readonly #attempts: number;
  readonly timeoutMs: number;
  readonly #underWay = new Set<AbortController>();
  #closed = false;

  constructor(options: ConnectionOptions) {
    this.url = checkedUrl(options.url);
    this.backend = options.backend;
    this.#apiKey = options.apiKey;
    this.#webhookSecret = options.webhookSecret;
    this.#attempts = options.attempts ?? 8;
    this.timeoutMs = options.timeoutMs ?? 10_000;
    if (!this.backend) {
      throw new TypeError("backend is empty; give the name that `taskbroker backend add` took");
    }
    // fetch would quote the whole header in its complaint.
    if (!/^[\x21-\x7e]+$/.test(this.#apiKey)) {
      throw new TypeError("apiKey is empty or has a character that no key has (a line break?)");
    }
    if (this.#webhookSecret !== undefined) signingKey(this.#webhookSecret);
    if (!(this.#attempts >= 1)) throw new TypeError("attempts must be at least 1");
  }

  create(owner: Owner, task: NewTask): Promise<Created> {
    const body = toJson({ owner, ...task });
    return this.#send({ method: "POST", path: "/v1/tasks", body }, isCreated);
  }

  read(taskRef: string, patience?: Patience): Promise<TaskState> {
    const path = `/v1/tasks/${encodeURIComponent(taskRef)}`;
    return this.#send({ method: "GET", path }, isTaskState, patience);
  }

  list(query: Record<string, string>): Promise<Page> {
    const path = `/v1/tasks?${new URLSearchParams(query)}`;
    return this.#send({ method: "GET", path }, isPage);
  }

  /** An event, to be reported. Without a date it is neither late nor makes others late. */
  event(taskRef: string, said: TaskEvent, { dated = true } = {}): Request {
    const timestamp = dated ? new Date().toISOString() : undefined;
    return {
      method: "POST",
      path: `/v1/webhooks/${encodeURIComponent(this.backend)}`,
      body: toJson({ type: "task.updated", timestamp, data: { taskRef, ...said } }),
      webhookId: `msg_${randomUUID()}`,
    };
  }

  /** Reports an event; however often that is done, it is applied once. */
  async report(event: Request, patience?: Patience): Promise<TaskState> {
    const { task, ...signals } = await this.#send(event, isReply, patience);
    return { ...task, ...signals };
  }

  /** Gives up whatever is under way, and takes no more. */
  close(): void {
    this.#closed = true;
    for (const waiting of this.#underWay) waiting.abort();
  }

  async #send<Answer>(
    request: Request,
    shape: Shape<Answer>,
    { attempts = this.#attempts, signal }: Patience = {},
  ): Promise<Answer> {
    for (let attempt = 1; ; attempt++) {
      this.#goOn(signal);
      const outcome = await this.#attempt(request, shape, signal);
      if ("answer" in outcome) return outcome.answer;
      this.#goOn(signal);
      if (attempt >= attempts) throw unreachable(request, attempt, outcome);
      await this.#pause(pauseMs(attempt, outcome.retryAfter, Math.random()), signal);
    }
  }

  #goOn(signal: AbortSignal | undefined): void {
    if (this.#closed) throw closed();
    signal?.throwIfAborted();
  }

  async #attempt<Answer>(
    request: Request,
    shape: Shape<Answer>,
    signal: AbortSignal | undefined,
  ): Promise<{ answer: Answer } | Failure> {
    try {
      return await this.#within(this.timeoutMs, signal, (limit) =>
        this.#exchange(request, shape, limit),
      );
    } catch (error) {
      if (error instanceof BrokerError) throw error;
      return { what: describe(error), retryAfter: null, cause: error };
    }
  }

  async #exchange<Answer>(
    request: Request,
    shape: Shape<Answer>,
    signal: AbortSignal,
  ): Promise<{ answer: Answer } | Failure> {
    const { method, path, body } = request;
    const headers = this.#headers(request);
    const init = { method, body, headers, redirect: "manual", signal } as const;
    const response = await fetch(this.url + path, init);
    const answer = parsed(await response.text());
    if (response.ok && shape(answer)) return { answer };
    const retryAfter = response.headers.get("retry-after");
    const problem = refusal(response.status, answer);
    if (!problem) {
      return { what: `${strange(response.status)}; is the URL right?`, retryAfter };
    }
    if (!worthRetrying(response.status)) throw problem;
    return { what: problem.message, retryAfter, cause: problem };
  }

  /** Made anew for each attempt: a signature is fresh or it is worth nothing. */
  #headers({ body, webhookId }: Request): Record<string, string> {
    const headers: Record<string, string> = {
      accept: "application/json",
      "user-agent": `taskbroker-sdk-typescript/${VERSION}`,
    };
    if (body !== undefined) headers["content-type"] = "application/json";
    if (webhookId !== undefined) headers["webhook-id"] = webhookId;
    if (body === undefined || webhookId === undefined || this.#webhookSecret === undefined) {
      return { ...headers, authorization: `Bearer ${this.#apiKey}` };
    }
    const now = Math.floor(Date.now() / 1000);
    const signature = sign(this.#webhookSecret, webhookId, now, body);
    return { ...headers, "webhook-timestamp": `${now}`, "webhook-signature": signature };
  }

  async #pause(ms: number, signal: AbortSignal | undefined): Promise<void> {
    await this.#within(Infinity, signal, (limit) =>
      sleep(ms, undefined, { signal: limit }).catch(() => undefined),
    );
  }

  /** Does something that is given up in time, when the connection closes, or by a signal. */
  async #within<T>(
    ms: number,
    signal: AbortSignal | undefined,
    act: (limit: AbortSignal) => Promise<T>,
  ): Promise<T> {
    const limit = new AbortController();
    const giveUp = () => limit.abort();
    const late = () => limit.abort(new Error("it took too long"));
    const timer = Number.isFinite(ms) ? setTimeout(late, ms) : undefined;
    this.#underWay.add(limit);
    signal?.addEventListener("abort", giveUp);
    try {
      return await act(limit.signal);
    } finally {
      clearTimeout(timer);
      this.#underWay.delete(limit);
      signal?.removeEventListener("abort", giveUp);
    }
  }
}

function unreachable({ method, path }: Request, attempts: number, last: Failure): Unreachable {
  const what = `${method} ${path.split("?")[0]}`;
  const many = `${attempts} attempt${attempts > 1 ? "s" : ""}`;
  const message = `No usable answer to ${what} in ${many}; the last one: ${last.what}`;
  return new Unreachable(message, { cause: last.cause });
}

/** What counts as the broker's no. A proxy's own page says nothing of a task. */
function refusal(status: number, answer: unknown): Problem | undefined {
  if (status >= 300 && isProblem(answer)) return new Problem(status, answer);
  // Whoever says that it is too large: what was sent will not get smaller.
  return status === 413 ? new Problem(status, { title: strange(status) }) : undefined;
}

/** A page that is not quoted. */
function strange(status: number): string {
  const phrase = STATUS_CODES[status] ? `${status} ${STATUS_CODES[status]}` : `${status}`;
  return `${phrase}, not a broker's answer`;
}

function checkedUrl(text: string): string {
  const url = URL.canParse(text) ? new URL(text) : undefined;
  if (!url || !/^https?:$/.test(url.protocol)) {
    throw new TypeError("url must look like https://broker.example");
  }
  if (url.username || url.password || /[?#]/.test(text)) {
    throw new TypeError("url must have no user name, no query and no fragment");
  }
  return url.href.replace(/\/+$/, "");
}

/** JSON, of what JSON can say: a number that is none would silently become `null`. */
function toJson(value: unknown): string {
  try {
    return JSON.stringify(value, (member, part: unknown) => {
      if (typeof part === "number" && !Number.isFinite(part)) {
        throw new TypeError(`JSON has no ${part}; it stands in "${member}"`);
      }
      return part;
    });
  } catch (error) {
    throw new TypeError(`this cannot be sent as JSON: ${(error as Error).message}`);
  }
}

function parsed(text: string): unknown {
  try {
    return JSON.parse(text);
  } catch {
    return undefined;
  }
}

/** Why there was no answer; fetch hides it in the cause. */
function describe(error: unknown): string {
  const { message, cause } = error as Error & { cause?: { code?: string; message?: string } };
  return cause?.code ?? cause?.message ?? message;
}
