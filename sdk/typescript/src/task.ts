import { setTimeout as sleep } from "node:timers/promises";

import type { Connection } from "./connection.js";
import { CancelRequested, Problem } from "./errors.js";
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

/** One task of this tool server, whether this process has created it or not. */
export class Task {
  /** The task's name between tool server, broker and operator; it may be logged. */
  readonly ref: string;
  readonly #connection: Connection;
  readonly #stop: AbortController;

  /** @internal */
  constructor(connection: Connection, ref: string, stop: AbortController) {
    this.ref = ref;
    this.#connection = connection;
    this.#stop = stop;
  }

  /**
   * Aborts when nobody waits for the task any more: as soon as any reply of the broker says that
   * the client wants it cancelled, or that it has ended. Its `reason` is a `CancelRequested`.
   */
  get signal(): AbortSignal {
    return this.#stop.signal;
  }

  /** Reports any event. */
  report(event: TaskEvent): Promise<TaskState> {
    return this.#follow(this.#connection.report(this.ref, event));
  }

  /** Tells the client how far the work is. Throws `CancelRequested` when it shall stop. */
  async progress(message: string): Promise<TaskState> {
    return heed(await this.report({ statusMessage: message }));
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
   * Asks the client, and waits until it has answered all of it. A key is never used twice on a
   * task. Throws `CancelRequested` when the client cancels the task instead.
   */
  async ask<Key extends string>(
    questions: Record<Key, InputRequest>,
    message?: string,
  ): Promise<Record<Key, InputResponse>> {
    const keys = Object.keys(questions) as Key[];
    const event = { statusMessage: message, inputRequests: questions };
    let state = heed(await this.report({ status: "input_required", ...event }));
    for (let pause = FIRST_LOOK_MS; !keys.every((key) => key in state.inputResponses);) {
      await this.#pause(pause);
      pause = Math.min(pause * 1.5, LONGEST_LOOK_MS);
      state = heed(await this.read());
    }
    const answers = keys.map((key) => [key, state.inputResponses[key]]);
    return Object.fromEntries(answers) as Record<Key, InputResponse>;
  }

  /** The task as it stands, with its payload. */
  read(): Promise<TaskState> {
    return this.#follow(this.#connection.read(this.ref));
  }

  async #pause(ms: number): Promise<void> {
    try {
      await sleep(ms, undefined, { signal: this.signal });
    } catch {
      this.signal.throwIfAborted();
    }
  }

  /** Lets every reply, whatever it answers, stop the work when it says that this is over. */
  async #follow(reply: Promise<TaskState>): Promise<TaskState> {
    try {
      const state = await reply;
      if (isUnwanted(state)) this.#stop.abort(reasonToStop(state));
      return state;
    } catch (error) {
      if (error instanceof Problem && (error.status === 404 || error.status === 410)) {
        this.#stop.abort(new CancelRequested("The task is gone."));
      }
      throw error;
    }
  }
}

/** A task that was created here: it knows what to return from `tools/call`. */
export class CreatedTask extends Task {
  readonly #created: Created;

  /** @internal */
  constructor(connection: Connection, created: Created, stop: AbortController) {
    super(connection, created.taskRef, stop);
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

function isUnwanted(state: TaskState): boolean {
  return state.cancelRequested || isTerminal(state.status);
}

function reasonToStop(state: TaskState): CancelRequested {
  return new CancelRequested(
    isTerminal(state.status)
      ? `The task is already ${state.status}.`
      : "The client has asked for the task to be cancelled.",
  );
}

function heed(state: TaskState): TaskState {
  if (isUnwanted(state)) throw reasonToStop(state);
  return state;
}
