import { setImmediate as othersTurn, setTimeout as sleep } from "node:timers/promises";

import { BrokerError, CancelRequested, TaskFailed, Unreachable } from "./errors.js";
import type { Task } from "./task.js";
import type { RpcError, TaskEvent, ToolResult } from "./wire.js";

/** The work behind a task. What it returns completes the task. */
export type Work = (task: Task) => ToolResult | Promise<ToolResult>;

/** Told of what goes wrong behind a task: nobody else waits for it. */
export type OnError = (error: unknown, task: Task) => void;

export interface RunOptions {
  heartbeatMs: number;
  /** The task's own promise, which the heartbeat keeps. */
  stallAfterMs: number | null | undefined;
  onError: OnError;
}

const INTERNAL_ERROR = -32603;
const STOPPED = "the tool server was stopped";
const REFUSED = "the outcome of the tool could not be stored";

/** One piece of work in the background, and the task that it is reported on. */
export class Run {
  /** Settles when the work is over and its outcome has been reported. */
  readonly done: Promise<void>;
  readonly #task: Task;
  readonly #stop: AbortController;
  readonly #onError: OnError;
  /** Only one outcome is reported: the work's own, or that it was stopped. */
  #reported: Promise<void> | undefined;

  constructor(task: Task, stop: AbortController, work: Work, options: RunOptions) {
    this.#task = task;
    this.#stop = stop;
    this.#onError = options.onError;
    this.done = this.#run(work, options);
  }

  /** Stops the work, and reports at once what becomes of its task. */
  stop(): Promise<void> {
    const unwanted = this.#task.signal.aborted;
    this.#stop.abort(new BrokerError(STOPPED));
    this.#reported ??= this.#report(unwanted ? { status: "cancelled" } : failed(STOPPED));
    return this.#reported;
  }

  async #run(work: Work, options: RunOptions): Promise<void> {
    const over = new AbortController();
    this.#task.signal.addEventListener("abort", () => over.abort(), { once: true });
    void this.#beat(over.signal, options);
    const outcome = await this.#outcome(work);
    over.abort();
    this.#reported ??= this.#report(outcome);
    await this.#reported;
  }

  async #outcome(work: Work): Promise<TaskEvent> {
    try {
      // The answer to the call leaves first, however busy the work is.
      await othersTurn();
      this.#task.signal.throwIfAborted();
      return { status: "completed", result: await work(this.#task) };
    } catch (error) {
      if (error instanceof TaskFailed) {
        return failed(error.message, error.code, error.data);
      }
      if (error instanceof CancelRequested || this.#task.signal.aborted) {
        return { status: "cancelled" };
      }
      this.#onError(error, this.#task);
      return failed("the tool failed unexpectedly");
    }
  }

  async #report(outcome: TaskEvent): Promise<void> {
    try {
      await this.#task.report(outcome);
    } catch (error) {
      this.#onError(error, this.#task);
      if (error instanceof Unreachable) return;
      // Whatever the broker refused to take, the client must not be left waiting.
      await this.#task.report(failed(REFUSED)).catch(() => undefined);
    }
  }

  /**
   * Looks at the task now and then, so that even silent work learns that it shall stop; and where
   * the broker was promised events, sends one before it is missed.
   */
  async #beat(until: AbortSignal, { heartbeatMs, stallAfterMs }: RunOptions): Promise<void> {
    const reportEveryMs = stallAfterMs ? stallAfterMs / 3 : Infinity;
    const pause = Math.min(heartbeatMs, reportEveryMs);
    let reported = Date.now();
    while (!until.aborted) {
      try {
        await sleep(pause, undefined, { signal: until, ref: false });
        if (Date.now() - reported < reportEveryMs) {
          await this.#task.read();
        } else {
          reported = Date.now();
          await this.#task.report({});
        }
      } catch {
        // The next beat may fare better; what matters is said when the outcome is reported.
      }
    }
  }
}

function failed(message: string, code = INTERNAL_ERROR, data?: unknown): TaskEvent {
  const error: RpcError = { code, message, data };
  return { status: "failed", error };
}
