export {
  TaskBroker,
  type FromEnvOptions,
  type StartOptions,
  type TaskBrokerOptions,
} from "./broker.js";
export { BrokerError, CancelRequested, Problem, TaskFailed, Unreachable } from "./errors.js";
export type { Fault } from "./errors.js";
export { ownerFrom, type HeadersLike } from "./owner.js";
export { elicitation, textResult, type FormSchema } from "./results.js";
export type { Work } from "./run.js";
export { sign } from "./signing.js";
export type { CreatedTask, OnError, Task } from "./task.js";
export { isTerminal } from "./wire.js";
export type {
  CreateTaskResult,
  CreateTaskResultLegacy,
  InputRequest,
  InputResponse,
  NewTask,
  Owner,
  RpcError,
  TaskEvent,
  TaskState,
  TaskStatus,
  ToolResult,
} from "./wire.js";
