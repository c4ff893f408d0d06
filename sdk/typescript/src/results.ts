import type { ToolResult } from "./wire.js";

type TextResult = ToolResult & { content: { type: "text"; text: string }[] };

/** A tool result that is one text. */
export function textResult(text: string, { isError = false } = {}): TextResult {
  const result: TextResult = { content: [{ type: "text", text }] };
  return isError ? { ...result, isError } : result;
}

/** The JSON Schema of a form, which MCP wants flat. */
export interface FormSchema {
  type: "object";
  properties: Record<string, FieldSchema>;
  required?: string[];
}

interface FieldSchema {
  type: "string" | "number" | "integer" | "boolean" | "array";
  [keyword: string]: unknown;
}

/** A question to the user, who answers it in a form. */
export function elicitation<Schema extends FormSchema>(message: string, schema: Schema) {
  return {
    method: "elicitation/create",
    params: { mode: "form", message, requestedSchema: schema },
  } as const;
}
