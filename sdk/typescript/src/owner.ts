import type { Owner } from "./wire.js";

/** The headers of a request: Fetch `Headers`, a `Map`, or an object such as Node's own. */
export type HeadersLike =
  | Headers
  | ReadonlyMap<string, string>
  | Readonly<Record<string, string | readonly string[] | undefined>>;

/**
 * Who a task will belong to, from the headers of the MCP request that is being answered.
 *
 * `Task-Owner` is the handle that the broker's gateway adds; without it the client's own
 * credential counts. A request with neither is anonymous.
 */
export function ownerFrom(headers?: HeadersLike): Owner {
  const handle = valueOf(headers, "task-owner");
  if (handle) return { handle };
  const authorization = valueOf(headers, "authorization");
  return authorization ? { authorization } : { anonymous: true };
}

function valueOf(headers: HeadersLike = {}, wanted: string): string | undefined {
  for (const [name, value] of entriesOf(headers)) {
    if (name.toLowerCase() === wanted) return typeof value === "string" ? value : value?.[0];
  }
  return undefined;
}

function entriesOf(
  headers: HeadersLike,
): Iterable<[string, string | readonly string[] | undefined]> {
  return headers instanceof Headers || headers instanceof Map
    ? headers.entries()
    : Object.entries(headers);
}
