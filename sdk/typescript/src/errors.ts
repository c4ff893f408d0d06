// What can go wrong.
//
//   Error
//   ├── BrokerError           the broker, or the way to it
//   │   ├── Problem           the broker refused what was asked (RFC 9457)
//   │   └── Unreachable       no answer, however often it was tried
//   ├── CancelRequested       nobody waits for the task any more: stop the work
//   └── TaskFailed            thrown by a tool: how its task is to fail

/** The broker, or the way to it, did not do what was asked. */
export class BrokerError extends Error {
  static {
    this.prototype.name = "BrokerError";
  }
}

/** One thing that is wrong with what was sent: where (a JSON pointer) and what to do about it. */
export interface Fault {
  readonly pointer: string;
  readonly detail: string;
}

/** The broker refused. The same request will be refused again. */
export class Problem extends BrokerError {
  static {
    this.prototype.name = "Problem";
  }

  readonly status: number;
  readonly title: string;
  readonly detail: string;
  readonly errors: readonly Fault[];
  /** The problem document as it came. */
  readonly document: Readonly<Record<string, unknown>>;

  constructor(status: number, document: Readonly<Record<string, unknown>>) {
    const title = typeof document.title === "string" ? document.title : `HTTP status ${status}`;
    const detail = typeof document.detail === "string" ? document.detail : "";
    const errors = Array.isArray(document.errors) ? document.errors.filter(isFault) : [];
    const sentence = detail ? `${title}: ${detail}` : title;
    const faults = errors.map((fault) => `${fault.pointer}: ${fault.detail}`).join("; ");
    super(faults ? `${sentence} (${faults})` : sentence);
    this.status = status;
    this.title = title;
    this.detail = detail;
    this.errors = errors;
    this.document = document;
  }
}

function isFault(value: unknown): value is Fault {
  const { pointer, detail } = (value ?? {}) as Partial<Fault>;
  return typeof pointer === "string" && typeof detail === "string";
}

/** The broker gave no usable answer in all attempts; the last one's failure is the `cause`. */
export class Unreachable extends BrokerError {
  static {
    this.prototype.name = "Unreachable";
  }
}

/** The client has asked for the task to be cancelled, or the task has ended without this server. */
export class CancelRequested extends Error {
  static {
    this.prototype.name = "CancelRequested";
  }
}

/**
 * Thrown by a tool: its task fails with this JSON-RPC error. Its text reaches the client. A tool
 * that ran and found something wrong returns a result with `isError` instead.
 */
export class TaskFailed extends Error {
  static {
    this.prototype.name = "TaskFailed";
  }

  constructor(
    readonly code: number,
    message: string,
    readonly data?: unknown,
  ) {
    super(message);
  }
}
