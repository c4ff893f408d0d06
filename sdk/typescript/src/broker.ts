import { randomUUID } from "node:crypto";
import { setTimeout as sleep } from "node:timers/promises";

import { Connection, type ConnectionOptions } from "./connection.js";
import { closed } from "./errors.js";
import { Run, type Work } from "./run.js";
import { CreatedTask, Task, type OnError } from "./task.js";
import { isTerminal, type NewTask, type Owner, type TaskState, type TaskStatus } from "./wire.js";

export interface TaskBrokerOptions extends ConnectionOptions {
  /** How often work in the background looks whether it is still wanted; 2 000 unless set. */
  heartbeatMs?: number;
  /** How long `close` lets work clean up; 5 000 unless set. */
  graceMs?: number;
  /** Told of errors in background work; they go to `console.error` unless set. */
  onError?: OnError;
}

/** What the environment does not say. */
export type FromEnvOptions = Omit<
  TaskBrokerOptions,
  "url" | "backend" | "apiKey" | "webhookSecret"
>;

/** What `start` may say about the task that it creates: everything but how it ends. */
export type StartOptions = Omit<NewTask, "status" | "result" | "error" | "inputRequests">;

/** The broker that keeps the tasks of this tool server. */
export class TaskBroker {
  readonly #connection: Connection;
  readonly #heartbeatMs: number;
  readonly #graceMs: number;
  readonly #onError: OnError;
  readonly #starting = new Set<Promise<unknown>>();
  readonly #running = new Map<string, Run>();
  #closed = false;

  constructor(options: TaskBrokerOptions) {
    this.#connection = new Connection(options);
    this.#heartbeatMs = options.heartbeatMs ?? 2_000;
    if (!(this.#heartbeatMs > 0)) throw new TypeError("heartbeatMs must be more than 0");
    this.#graceMs = options.graceMs ?? 5_000;
    this.#onError = harmless(options.onError ?? logError);
  }

  /**
   * Takes BROKER_URL, BROKER_BACKEND, BROKER_API_KEY and, if it is there, BROKER_WEBHOOK_SECRET
   * from the environment.
   */
  static fromEnv(
    options: FromEnvOptions = {},
    environment: Readonly<Record<string, string | undefined>> = process.env,
  ): TaskBroker {
    const { BROKER_URL = "", BROKER_BACKEND = "", BROKER_API_KEY = "" } = environment;
    const required = { BROKER_URL, BROKER_BACKEND, BROKER_API_KEY };
    const missing = Object.entries(required).filter(([, value]) => value === "");
    if (missing.length > 0) {
      const names = missing.map(([name]) => name).join(", ");
      const help = "`taskbroker backend add NAME` makes a backend and shows its keys.";
      throw new TypeError(`not set: ${names}. ${help}`);
    }
    return new TaskBroker({
      ...options,
      url: BROKER_URL,
      backend: BROKER_BACKEND,
      apiKey: BROKER_API_KEY,
      webhookSecret: environment.BROKER_WEBHOOK_SECRET || undefined,
    });
  }

  get url(): string {
    return this.#connection.url;
  }

  get backend(): string {
    return this.#connection.backend;
  }

  /** Creates a task. With the `externalId` and owner of an earlier one you get that one again. */
  async create(owner: Owner, task: NewTask = {}): Promise<CreatedTask> {
    return this.#create(owner, task);
  }

  /**
   * Creates a task and does its work in the background.
   *
   * What `work` returns completes the task. A `TaskFailed` fails it with that error, any other
   * exception with one that tells the client nothing; `onError` is told. When the client cancels,
   * `task.signal` aborts, and the task is cancelled as soon as the work has stopped. With
   * `stallAfterMs` the broker fails the task by itself if this process dies.
   *
   * The work of a task that already runs here, or has ended, is not started again.
   */
  async start(owner: Owner, work: Work, options: StartOptions = {}): Promise<CreatedTask> {
    return this.#beforeClosing(async () => {
      const task = await this.#create(owner, options);
      if (!isTerminal(task.createTaskResult.status)) this.#run(task, work, options.stallAfterMs);
      return task;
    });
  }

  /** Does work for a task that exists, as after a restart of the tool server. */
  async resume(ref: string, work: Work): Promise<Task> {
    return this.#beforeClosing(async () => {
      const task = this.task(ref);
      const { status, stallAfterMs } = await task.read();
      if (!isTerminal(status)) this.#run(task, work, stallAfterMs);
      return task;
    });
  }

  /** A handle on a task that was created earlier, or elsewhere. */
  task(ref: string): Task {
    return new Task(this.#connection, ref, this.#stopping(ref), this.#onError);
  }

  /** This tool server's tasks, newest first, without their payloads. */
  async *list(
    filter: { status?: TaskStatus; externalId?: string } = {},
  ): AsyncGenerator<TaskState, void, undefined> {
    const given = Object.entries(filter).filter(([, value]) => value !== undefined);
    const query: Record<string, string> = Object.fromEntries(given);
    for (;;) {
      const { tasks, nextCursor } = await this.#connection.list({ limit: "200", ...query });
      yield* tasks;
      if (nextCursor === undefined) return;
      query.cursor = nextCursor;
    }
  }

  /** The task with this id of your own, if there is one. */
  async find(externalId: string): Promise<TaskState | undefined> {
    for await (const state of this.list({ externalId })) return state;
    return undefined;
  }

  /**
   * Tells the work in the background to stop, lets it clean up for `graceMs`, and reports what
   * became of it: a result that it comes to, or that the task failed ("the tool server was
   * stopped"). What cannot be reported within `graceMs` and `timeoutMs` goes to `onError`.
   */
  async close(): Promise<void> {
    this.#closed = true;
    for (const run of this.#running.values()) run.close();
    const over = new AbortController();
    const enough = sleep(this.#graceMs + this.#connection.timeoutMs, undefined, over);
    await Promise.race([this.#allEnds(), enough]);
    over.abort();
    this.#connection.close();
    await this.#allEnds(); // at once: nothing is under way any more
  }

  [Symbol.asyncDispose](): Promise<void> {
    return this.close();
  }

  async #allEnds(): Promise<void> {
    while (this.#starting.size + this.#running.size > 0) {
      const ends = [...this.#running.values()].map(({ ended }) => ended);
      await Promise.all([...this.#starting, ...ends]);
    }
  }

  /** Lets `close` wait: there may be a task in the end, to be reported on. */
  async #beforeClosing<T extends Task>(start: () => Promise<T>): Promise<T> {
    if (this.#closed) throw closed();
    const starting = start();
    const settled = starting.catch(() => undefined);
    this.#starting.add(settled);
    try {
      return await starting;
    } finally {
      this.#starting.delete(settled);
    }
  }

  async #create(owner: Owner, task: NewTask): Promise<CreatedTask> {
    // An id of its own makes the request repeatable: trying again leaves no second task.
    const repeatable = { ...task, externalId: task.externalId ?? randomUUID() };
    const created = await this.#connection.create(owner, repeatable);
    const stopping = this.#stopping(created.taskRef);
    return new CreatedTask(this.#connection, created, stopping, this.#onError);
  }

  /** What stops the work of a task, whether it runs here already or is yet to. */
  #stopping(ref: string): AbortController {
    return this.#running.get(ref)?.task.stopping ?? new AbortController();
  }

  #run(task: Task, work: Work, stallAfterMs: number | null | undefined): void {
    if (this.#running.has(task.ref)) return;
    const run = new Run(this.#connection, task, work, {
      heartbeatMs: this.#heartbeatMs,
      graceMs: this.#graceMs,
      stallAfterMs,
      onError: this.#onError,
    });
    this.#running.set(task.ref, run);
    void run.ended.then(() => this.#running.delete(task.ref));
    if (this.#closed) run.close();
  }
}

/** An `onError` that throws shall not take the outcome of the work with it. */
function harmless(onError: OnError): OnError {
  return (error, task) => {
    try {
      onError(error, task);
    } catch (another) {
      logError(another, task);
    }
  };
}

function logError(error: unknown, task: Task): void {
  console.error(`taskbroker: task ${task.ref}:`, error);
}
