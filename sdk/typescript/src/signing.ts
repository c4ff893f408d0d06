// Standard Webhooks 1.0: `v1,` and the base64 of HMAC-SHA256 over `id.timestamp.body`.
import { createHmac } from "node:crypto";

const SECRET = /^whsec_((?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?)$/;

/** The key inside a webhook secret. */
export function signingKey(secret: string): Uint8Array {
  const encoded = SECRET.exec(secret)?.[1];
  if (!encoded) {
    throw new TypeError("a webhook secret is whsec_ and base64; this text is something else");
  }
  return Buffer.from(encoded, "base64");
}

/** The `webhook-signature` of a body that is sent at `timestamp`, in whole seconds. */
export function sign(
  secret: string,
  webhookId: string,
  timestamp: number,
  body: string | Uint8Array,
): string {
  const hmac = createHmac("sha256", signingKey(secret));
  return `v1,${hmac.update(`${webhookId}.${timestamp}.`).update(body).digest("base64")}`;
}
