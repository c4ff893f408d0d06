import { once } from "node:events";
import { setImmediate as othersTurn, setTimeout as sleep } from "node:timers/promises";

import type { Connection } from "./connection.js";
import { CancelRequested, Problem, Stopped, TaskFailed, Unreachable } from "./errors.js";
import { LONGEST_PAUSE_MS, pauseMs } from "./retries.js";
import type { OnError, Task } from "./task.js";
import type { RpcError, TaskEvent, ToolResult } from "./wire.js";

/** The work behind a task. What it returns completes the task. */
export type Work = (task: Task) => ToolResult | Promise<ToolResult>;

export interface RunOptions {
  heartbeatMs: number;
  /** How long work may clean up once it is told to stop because its server does. */
  graceMs: number;
  /** The task's own promise, which the heartbeat keeps. */
  stallAfterMs: number | null | undefined;
  onError: OnError;
}

const INTERNAL_ERROR = -32603;
const SIGNS_BEFORE_STALL = 3;

/** One piece of work in the background, and the task that it is reported on. */
export class Run {
  readonly task: Task;
  /** Settles when the work is over and that has been reported, as far as it can be. */
  readonly ended: Promise<void>;
  readonly #connection: Connection;
  readonly #options: RunOptions;
  readonly #closing = new AbortController();

  constructor(connection: Connection, task: Task, work: Work, options: RunOptions) {
    this.#connection = connection;
    this.task = task;
    this.#options = options;
    this.ended = this.#keep(work);
  }

  /** Tells the work to stop; `ended` tells when that is reported. */
  close(): void {
    this.task.stopping.abort(new Stopped());
    this.#closing.abort();
  }

  /** Watches over the work to its end, and sees to it that the end gets known. */
  async #keep(work: Work): Promise<void> {
    const over = new AbortController();
    void this.#beat(over.signal);
    const outcome = await Promise.race([this.#outcome(work), this.#outOfPatience(over.signal)]);
    over.abort();
    await this.#deliver(outcome);
  }

  async #outcome(work: Work): Promise<TaskEvent> {
    try {
      // The answer to the call leaves first, however busy the work is.
      await othersTurn();
      this.task.signal.throwIfAborted();
      return { status: "completed", result: await work(this.task) };
    } catch (error) {
      if (error instanceof TaskFailed) return failed(error.message, error.code, error.data);
      if (error instanceof CancelRequested) return stopped(error);
      if (this.task.signal.aborted) return stopped(this.task.signal.reason);
      this.#options.onError(error, this.task);
      return failed("internal error in the tool server");
    }
  }

  /** What is said of work that does not stop although its server is closed. */
  async #outOfPatience(over: AbortSignal): Promise<TaskEvent> {
    if (!this.#closing.signal.aborted) await once(this.#closing.signal, "abort");
    await sleep(this.#options.graceMs, undefined, { signal: over });
    return stopped(this.task.signal.reason);
  }

  /** Brings an outcome to the broker; what cannot be helped goes to `onError`. */
  async #deliver(outcome: TaskEvent): Promise<void> {
    const { onError } = this.#options;
    try {
      await this.#insist(outcome);
    } catch (error) {
      onError(error, this.task);
      const instead = insteadOf(error);
      if (!instead) return;
      await this.#insist(failed(instead)).catch((again) => onError(again, this.task));
    }
  }

  /**
   * Outlives a broker that is away. Once this server closes, there is one more round of attempts.
   * It stays the same event.
   */
  async #insist(outcome: TaskEvent): Promise<void> {
    const closing = this.#closing.signal;
    const event = this.#connection.event(this.task.ref, outcome);
    for (let round = 1, refused = false; ; round++) {
      const last = closing.aborted;
      try {
        await this.#connection.report(event, last ? {} : { signal: closing });
        return;
      } catch (error) {
        if (!last && error === closing.reason) continue;
        if (last || !mayPass(error)) throw error;
        this.#options.onError(error, this.task);
        refused = error instanceof Problem;
      }
      const pause = refused ? LONGEST_PAUSE_MS : pauseMs(round, null, Math.random());
      await sleep(pause, undefined, { signal: closing }).catch(() => undefined);
    }
  }

  /**
   * Looks at the task now and then, so that even silent work learns that it shall stop; and where
   * the broker was promised events, gives a sign of life before it is missed.
   */
  async #beat(over: AbortSignal): Promise<void> {
    const { heartbeatMs, stallAfterMs } = this.#options;
    const betweenSigns = stallAfterMs ? stallAfterMs / SIGNS_BEFORE_STALL : Infinity;
    const pause = Math.min(heartbeatMs, betweenSigns);
    let lastSign = Date.now();
    for (;;) {
      await sleep(pause, undefined, { signal: over, ref: false }).catch(() => undefined);
      // Work that does not stop when it is told to shall not keep its task alive.
      if (over.aborted || this.task.signal.aborted) return;
      const lively = Date.now() + pause - lastSign > betweenSigns; // the next would come too late
      if (lively) lastSign = Date.now();
      // The next beat may fare better; what matters is said when the outcome is reported.
      await this.task.beat({ lively }).catch(() => undefined);
    }
  }
}

/** Keys are being rotated, backends disabled for a while. */
function mayPass(error: unknown): boolean {
  const { status } = error instanceof Problem ? error : {};
  return error instanceof Unreachable || status === 401 || status === 403;
}

function stopped(reason: CancelRequested): TaskEvent {
  if (reason instanceof Stopped) return failed(reason.message);
  return { status: "cancelled", statusMessage: reason.message };
}

/** What to say of an outcome that the broker will never take: nobody shall be left waiting. */
function insteadOf(error: unknown): string | undefined {
  if (error instanceof TypeError) return "the outcome of the tool cannot be sent";
  if (error instanceof Problem && [400, 413, 422].includes(error.status)) {
    return "the broker refused the outcome of the tool";
  }
  return undefined;
}

function failed(message: string, code = INTERNAL_ERROR, data?: unknown): TaskEvent {
  const error: RpcError = { code, message, data };
  return { status: "failed", error };
}
