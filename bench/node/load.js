// Loads Redis nodes with workers that acquire and release by node-redlock, with the arguments and the
// output of the Go program in ../go.

import { parseArgs } from "node:util";
import { Redis } from "ioredis";
import Redlock from "redlock";

const TTL_MS = 30_000;

const { values } = parseArgs({
  options: {
    addr: { type: "string" },
    workers: { type: "string" },
    resource: { type: "string", default: "own" },
    seconds: { type: "string", default: "3" },
    "warm-up": { type: "string", default: "0.5" },
  },
});
const shared = values.resource === "one";
const nodes = values.addr.split(",").map((url) => new Redis(url));
// It polls with its default delay of 200 to 300 ms until it has the lock.
const locks = new Redlock(nodes, { retryCount: -1 });

const beginAt = performance.now() + Number(values["warm-up"]) * 1000;
const endAt = beginAt + Number(values.seconds) * 1000;
const acquireMs = [];
const pairMs = [];
let holder = -1;
let handOvers = 0;

function isMeasured(instant) {
  return beginAt < instant && instant < endAt;
}

async function work(worker) {
  const resource = shared ? "bench/one" : `bench/${worker}`;
  for (;;) {
    const startedAt = performance.now();
    if (startedAt > endAt) return;
    const lock = await locks.lock(resource, TTL_MS);
    const grantedAt = performance.now();
    if (holder !== worker && isMeasured(grantedAt)) handOvers += 1;
    holder = worker;
    await lock.unlock();
    const releasedAt = performance.now();
    if (isMeasured(releasedAt)) {
      acquireMs.push(grantedAt - startedAt);
      pairMs.push(releasedAt - startedAt);
    }
  }
}

// Tells the harness when to read the CPU times of the nodes, and returns this program's own.
async function announce() {
  await new Promise((resolve) => setTimeout(resolve, beginAt - performance.now()));
  console.log("begin");
  const before = process.cpuUsage();
  await new Promise((resolve) => setTimeout(resolve, endAt - performance.now()));
  console.log("end");
  const used = process.cpuUsage(before);
  return (used.user + used.system) / 1e6;
}

function latency(values) {
  const sorted = Float64Array.from(values).sort();
  const at = (share) => sorted[Math.min(sorted.length - 1, Math.floor(sorted.length * share))];
  return { p50_ms: at(0.5), p99_ms: at(0.99), p99_9_ms: at(0.999), max_ms: at(1) };
}

const workers = Array.from({ length: Number(values.workers) }, (_, worker) => work(worker));
const [cpuS] = await Promise.all([announce(), ...workers]);
if (pairMs.length === 0) throw new Error(`no worker completed a pair within ${values.seconds} s`);
const result = {
  seconds: Number(values.seconds),
  pairs: pairMs.length,
  hand_overs: handOvers,
  cpu_s: cpuS,
  pair: latency(pairMs),
  acquire: latency(acquireMs),
};
console.log(JSON.stringify(result));
nodes.forEach((node) => node.disconnect());
