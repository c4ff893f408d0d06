// The work behind the tools; it knows nothing of tasks.
import { setImmediate as othersTurn } from "node:timers/promises";

/** Who waits for a count, and may lose interest in it. */
export interface Waiting {
  signal: AbortSignal;
  progress?(message: string): Promise<unknown>;
}

/** Says how many primes there are below the limit; rejects when `waiting.signal` aborts. */
export async function countPrimes(limit: number, waiting: Waiting): Promise<string> {
  let found = 0;
  let reported = Date.now();
  for (let n = 2; n < limit; n++) {
    if (isPrime(n)) found++;
    if (n % 1_000 !== 0) continue;
    await othersTurn();
    waiting.signal.throwIfAborted();
    if (Date.now() - reported < 200) continue;
    await waiting.progress?.(`${Math.floor((100 * n) / limit)} %`);
    reported = Date.now();
  }
  return `There are ${found} primes below ${limit}.`;
}

function isPrime(n: number): boolean {
  for (let divisor = 2; divisor * divisor <= n; divisor++) if (n % divisor === 0) return false;
  return true;
}
