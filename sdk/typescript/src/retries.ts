const FIRST_PAUSE_MS = 200;
export const LONGEST_PAUSE_MS = 10_000;
const LONGEST_RETRY_AFTER_MS = 60_000;

/** Whether a request that the broker refuses with this status may fare better later. */
export function worthRetrying(status: number): boolean {
  return status >= 500 || status === 408 || status === 429;
}

/**
 * How long to wait after the attempt of this number (the first is 1): twice as long each time,
 * and up to half less by `chance` (0 to 1), so that many clients do not come back together. A
 * `Retry-After` in seconds is waited for as well; its other form, a date, is not.
 */
export function pauseMs(attempt: number, retryAfter: string | null, chance: number): number {
  const backoff = Math.min(FIRST_PAUSE_MS * 2 ** (attempt - 1), LONGEST_PAUSE_MS);
  const asked = /^\d+$/.test(retryAfter ?? "") ? Number(retryAfter) * 1000 : 0;
  return Math.max(backoff * (1 - chance / 2), Math.min(asked, LONGEST_RETRY_AFTER_MS));
}
