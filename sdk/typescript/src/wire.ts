// What goes over the wire, as docs/backend-api.md of Task Broker has it.

export type TaskStatus = "working" | "input_required" | "completed" | "failed" | "cancelled";

/** What a tool returns: an MCP CallToolResult. */
export interface ToolResult {
  content: readonly object[];
  isError?: boolean;
  [member: string]: unknown;
}

/** A JSON-RPC error object. */
export interface RpcError {
  code: number;
  message: string;
  data?: unknown;
}

/** A question to the client. */
export interface InputRequest {
  method: "elicitation/create" | "sampling/createMessage" | "roots/list";
  params?: Record<string, unknown>;
}

/** What the client said; `action` and `content` are those of an elicitation. */
export interface InputResponse {
  action?: "accept" | "decline" | "cancel";
  content?: Record<string, unknown>;
  [member: string]: unknown;
}

/** Who a task belongs to; `ownerFrom` makes one. */
export type Owner =
  { handle: string } | { authorization: string } | { tokenSha256: string } | { anonymous: true };

/** What may be said about a task, at its creation and in each event. */
export interface TaskEvent {
  status?: TaskStatus;
  statusMessage?: string;
  /** With status `completed`. */
  result?: ToolResult;
  /** With status `failed`. */
  error?: RpcError;
  /** With status `input_required`. A key is never used twice on a task. */
  inputRequests?: Record<string, InputRequest>;
  /** How often clients should ask. */
  pollIntervalMs?: number;
  /** How long the task is kept, counted from its creation; `null`: without end. */
  ttlMs?: number | null;
  /** After so long without an event the broker fails the task; `null`: never. */
  stallAfterMs?: number | null;
}

export interface NewTask extends TaskEvent {
  /** A name for the operator. */
  tool?: string;
  /** Your own job id, unique among your tasks; made up when it is not given. */
  externalId?: string;
}

/** A task as the broker tells its tool server. It has no task id: that is the client's alone. */
export interface TaskState {
  readonly taskRef: string;
  readonly externalId?: string;
  readonly tool?: string;
  readonly status: TaskStatus;
  readonly statusMessage?: string;
  readonly createdAt: string;
  readonly lastUpdatedAt: string;
  readonly ttlMs: number | null;
  readonly pollIntervalMs?: number;
  readonly stallAfterMs?: number;
  readonly cancelRequested: boolean;
  /** All answers of the client so far, by their keys. */
  readonly inputResponses: Readonly<Record<string, InputResponse>>;
  /** `result`, `error` and `inputRequests` come with `read()` only. */
  readonly result?: ToolResult;
  readonly error?: RpcError;
  readonly inputRequests?: Readonly<Record<string, InputRequest>>;
  /** In the reply to an event: whether it changed the task, and if not, why. */
  readonly applied?: boolean;
  readonly reason?: "duplicate" | "terminal" | "stale";
}

/** What `tools/call` returns to a client of MCP 2026-07-28 when the call has become a task. */
export interface CreateTaskResult {
  resultType: "task";
  taskId: string;
  status: TaskStatus;
  statusMessage?: string;
  createdAt: string;
  lastUpdatedAt: string;
  ttlMs: number | null;
  pollIntervalMs?: number;
  [member: string]: unknown;
}

/** The same for a client of MCP 2025-11-25. */
export interface CreateTaskResultLegacy {
  task: Record<string, unknown>;
  [member: string]: unknown;
}

/** The answer to the creation of a task. */
export interface Created {
  taskRef: string;
  createTaskResult: CreateTaskResult;
  createTaskResultLegacy: CreateTaskResultLegacy;
}

/** Whether a task with this status has ended, and will never change again. */
export function isTerminal(status: TaskStatus): boolean {
  return status === "completed" || status === "failed" || status === "cancelled";
}

/** The answer to an event. */
export interface Reply {
  applied: boolean;
  reason?: TaskState["reason"];
  task: TaskState;
  cancelRequested: boolean;
  inputResponses: TaskState["inputResponses"];
}

/** A part of a list; the cursor leads to the next one. */
export interface Page {
  tasks: TaskState[];
  nextCursor?: string;
}

// Whether an answer is one of a broker, or of something else that listens at that URL.

export function isCreated(answer: unknown): answer is Created {
  const { taskRef, createTaskResult } = membersOf(answer);
  return typeof taskRef === "string" && typeof membersOf(createTaskResult).status === "string";
}

export function isTaskState(answer: unknown): answer is TaskState {
  return isTask(answer) && hasSignals(answer);
}

export function isReply(answer: unknown): answer is Reply {
  return isTask(membersOf(answer).task) && hasSignals(answer);
}

export function isPage(answer: unknown): answer is Page {
  const { tasks } = membersOf(answer);
  return Array.isArray(tasks) && tasks.every(isTaskState);
}

/** A refusal in the broker's own words: nobody else's problem documents have such a type. */
export function isProblem(answer: unknown): answer is Record<string, unknown> {
  const { type } = membersOf(answer);
  return typeof type === "string" && type.startsWith("urn:taskbroker:problem:");
}

function isTask(value: unknown): boolean {
  const { taskRef, status } = membersOf(value);
  return typeof taskRef === "string" && typeof status === "string";
}

function hasSignals(value: unknown): boolean {
  const { cancelRequested, inputResponses } = membersOf(value);
  return typeof cancelRequested === "boolean" && isObject(inputResponses);
}

function membersOf(value: unknown): Record<string, unknown> {
  return isObject(value) ? value : {};
}

function isObject(value: unknown): value is Record<string, unknown> {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}
