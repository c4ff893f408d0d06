// What can go wrong. What can never be right, as a malformed key or NaN, is a TypeError.
//
//   Error
//   ├── BrokerError           the broker, or the way to it
//   │   ├── Problem           the broker refused what was asked (RFC 9457)
//   │   └── Unreachable       no answer, however often it was tried
//   ├── CancelRequested       nobody waits for the task any more: stop the work
//   │   └── Stopped           because the tool server is being stopped (not exported)
//   └── TaskFailed            thrown by a tool: how its task is to fail

/** The broker, or the way to it, did not do what was asked; by itself, a client that is closed. */
export class BrokerError extends Error {
  static {
    this.prototype.name = "BrokerError";
  }
}

export function closed(): BrokerError {
  return new BrokerError("This client is closed.");
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
    const faults = errors.map((fault) => ` [${fault.pointer}: ${fault.detail}]`).join("");
    super((detail ? `${title}: ${detail}` : title) + faults);
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

/**
 * The broker gave no usable answer in all attempts: none at all, 408, 429, 5xx, or one that is not
 * in a broker's words (an error page of a proxy, a wrong URL). Its `cause` is the last failure.
 */
export class Unreachable extends BrokerError {
  static {
    this.prototype.name = "Unreachable";
  }
}

/**
 * The work should stop: its client has lost interest, or its task has ended already. Work may throw
 * it by itself as well; the task then ends `cancelled` with this message.
 */
export class CancelRequested extends Error {
  static {
    this.prototype.name = "CancelRequested";
  }

  constructor(message = "stopped, as the client asked") {
    super(message);
  }
}

/** The work should stop because its tool server does. */
export class Stopped extends CancelRequested {
  constructor() {
    super("the tool server was stopped");
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
