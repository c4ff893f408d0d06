import { setTimeout as sleep } from "node:timers/promises";

import type { Connection } from "./connection.js";
import { CancelRequested, Problem, Unreachable } from "./errors.js";
import {
  isTerminal,
  type Created,
  type CreateTaskResult,
  type CreateTaskResultLegacy,
  type InputRequest,
  type InputResponse,
  type TaskEvent,
  type TaskState,
  type ToolResult,
} from "./wire.js";

const FIRST_LOOK_MS = 200;
const LONGEST_LOOK_MS = 2_000;

/** Told of what goes wrong behind a task: nobody else waits for it. */
export type OnError = (error: unknown, task: Task) => void;

/** One task of this tool server, whether this process has created it or not. */
export class Task {
  /** The task's name between tool server, broker and operator; it may be logged. */
  readonly ref: string;
  readonly #connection: Connection;
  /** @internal */
  readonly stopping: AbortController;
  readonly #onError: OnError;

  /** @internal */
  constructor(connection: Connection, ref: string, stopping: AbortController, onError: OnError) {
    this.ref = ref;
    this.#connection = connection;
    this.stopping = stopping;
    this.#onError = onError;
  }

  /**
   * Aborts when nobody waits for the task any more: as soon as any reply of the broker says that
   * the client wants it cancelled, or that it has ended. Its `reason` is a `CancelRequested`.
   */
  get signal(): AbortSignal {
    return this.stopping.signal;
  }

  /** Reports any event. */
  async report(event: TaskEvent): Promise<TaskState> {
    return this.#follow(this.#connection.report(this.#connection.event(this.ref, event)));
  }

  /**
   * Tells the client how far the work is. Throws `CancelRequested` when it shall stop. A message
   * that cannot be brought to the broker is dropped, `onError` is told, and the work goes on.
   */
  async progress(message: string): Promise<void> {
    this.signal.throwIfAborted();
    const event = this.#connection.event(this.ref, { statusMessage: message });
    await this.#unlessAway(this.#connection.report(event, { signal: this.signal }));
    this.signal.throwIfAborted();
  }

  complete(result: ToolResult): Promise<TaskState> {
    return this.report({ status: "completed", result });
  }

  /** Ends the task with a JSON-RPC error; a tool's own failure is a result with `isError`. */
  fail(code: number, message: string, data?: unknown): Promise<TaskState> {
    return this.report({ status: "failed", error: { code, message, data } });
  }

  cancelled(message?: string): Promise<TaskState> {
    return this.report({ status: "cancelled", statusMessage: message });
  }

  /**
   * Asks the client, and waits until it has answered all of it, however long that takes. A key is
   * never used twice on a task. Throws `CancelRequested` when the client cancels the task instead.
   */
  async ask<Key extends string>(
    questions: Record<Key, InputRequest>,
    message?: string,
  ): Promise<Record<Key, InputResponse>> {
    this.signal.throwIfAborted();
    const keys = Object.keys(questions) as Key[];
    const patience = { signal: this.signal };
    const event = this.#connection.event(this.ref, {
      status: "input_required",
      statusMessage: message,
      inputRequests: questions,
    });
    let { inputResponses: answers } = await this.#follow(this.#connection.report(event, patience));
    this.signal.throwIfAborted();
    for (let pause = FIRST_LOOK_MS; !keys.every((key) => Object.hasOwn(answers, key));) {
      await this.#pause(pause);
      pause = Math.min(pause * 1.5, LONGEST_LOOK_MS);
      const state = await this.#unlessAway(this.#connection.read(this.ref, patience));
      this.signal.throwIfAborted();
      answers = state?.inputResponses ?? answers;
    }
    const entries = keys.map((key) => [key, answers[key]]);
    return Object.fromEntries(entries) as Record<Key, InputResponse>;
  }

  /** The task as it stands, with its payload. */
  read(): Promise<TaskState> {
    return this.#follow(this.#connection.read(this.ref));
  }

  /**
   * @internal A look at the task, or a sign of life: an event that says nothing. It has no date,
   * which could make a message stale that was sent before it.
   */
  beat({ lively }: { lively: boolean }): Promise<TaskState> {
    const once = { attempts: 1 };
    if (!lively) return this.#follow(this.#connection.read(this.ref, once));
    const event = this.#connection.event(this.ref, {}, { dated: false });
    return this.#follow(this.#connection.report(event, once));
  }

  async #pause(ms: number): Promise<void> {
    try {
      await sleep(ms, undefined, { signal: this.signal });
    } catch {
      this.signal.throwIfAborted();
    }
  }

  /** What a reply says, if it comes: work goes on while the broker is away. */
  async #unlessAway(reply: Promise<TaskState>): Promise<TaskState | undefined> {
    try {
      return await this.#follow(reply);
    } catch (error) {
      if (!(error instanceof Unreachable)) throw error;
      this.#onError(error, this);
      return undefined;
    }
  }

  /** Lets every reply, whatever it answers, stop the work when it says that this is over. */
  async #follow(reply: Promise<TaskState>): Promise<TaskState> {
    try {
      const state = await reply;
      const reason = reasonToStop(state);
      if (reason) this.stopping.abort(reason);
      return state;
    } catch (error) {
      if (error instanceof Problem && (error.status === 404 || error.status === 410)) {
        this.stopping.abort(new CancelRequested(`the task is gone: ${error.title}`));
      }
      throw error;
    }
  }
}

/** A task that was created here: it knows what to return from `tools/call`. */
export class CreatedTask extends Task {
  readonly #created: Created;

  /** @internal */
  constructor(
    connection: Connection,
    created: Created,
    stopping: AbortController,
    onError: OnError,
  ) {
    super(connection, created.taskRef, stopping, onError);
    this.#created = created;
  }

  /** What `tools/call` returns, as it is, to a client that understands tasks (2026-07-28). */
  get createTaskResult(): CreateTaskResult {
    return this.#created.createTaskResult;
  }

  /** The same for a client of 2025-11-25. */
  get createTaskResultLegacy(): CreateTaskResultLegacy {
    return this.#created.createTaskResultLegacy;
  }
}

/** Why nobody needs the work any more, if so. */
function reasonToStop({ cancelRequested, status }: TaskState): CancelRequested | undefined {
  if (cancelRequested) return new CancelRequested();
  if (isTerminal(status)) return new CancelRequested(`the task has ended already: ${status}`);
  return undefined;
}
