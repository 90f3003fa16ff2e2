// A lock with fencing tokens, from Node. Every step checks what redfence promises.
//
// REDFENCE_SERVER and REDFENCE_STORAGE name the servers; `redfence dev` starts both.

import { randomUUID } from 'node:crypto';
import { uptime } from 'node:os';
import { setTimeout as sleep } from 'node:timers/promises';
import { fileURLToPath } from 'node:url';
import { promisify } from 'node:util';

import grpc from '@grpc/grpc-js';
import protoLoader from '@grpc/proto-loader';
import protobuf from 'protobufjs';

const RESOURCE = 'examples/node';
const TTL_MS = 4_000;
const WAIT_MS = 10_000;
const CALL_TIMEOUT_MS = 5_000;

// Loads the contract at run time. Tokens are below 2^53, so a number holds every one.
const { redfence } = grpc.loadPackageDefinition(
  protoLoader.loadSync(['redfence/v1/lock.proto', 'redfence/storage/v1/storage.proto'], {
    includeDirs: [fileURLToPath(new URL('../../protos', import.meta.url))],
    longs: Number,
    enums: String,
    defaults: true,
  }),
);

// gRPC keeps the details of a status in the metadata, as google.rpc.Status.
const { Status, ErrorInfo } = protobuf.parse(`
  syntax = "proto3";
  package google.rpc;
  message Any { string type_url = 1; bytes value = 2; }
  message Status { int32 code = 1; string message = 2; repeated Any details = 3; }
  message ErrorInfo { string reason = 1; string domain = 2; map<string, string> metadata = 3; }
`).root.lookup('google.rpc');

/** Returns the ErrorInfo in the details of a failed call, or undefined. */
function errorInfo(error) {
  const [bytes] = error.metadata?.get('grpc-status-details-bin') ?? [];
  const detail =
    bytes && Status.decode(bytes).details.find((each) => each.typeUrl.endsWith('/google.rpc.ErrorInfo'));
  return detail && ErrorInfo.decode(detail.value);
}

/**
 * Returns the milliseconds since boot. On Linux this clock of Node alone runs on in suspend:
 * `performance.now` stops there, so a lease would seem valid for too long.
 */
const now = () => Math.round(uptime() * 1000);
const CLOCK_STEP_MS = 10;

const toDuration = (ms) => ({ seconds: Math.floor(ms / 1000), nanos: (ms % 1000) * 1e6 });
const toMs = (duration) => duration.seconds * 1000 + duration.nanos / 1e6;

/** Calls a unary method. Without a deadline, a call to a frozen server never ends. */
const call = (client, method, request, timeoutMs = CALL_TIMEOUT_MS) =>
  promisify(client[method].bind(client))(request, { deadline: Date.now() + timeoutMs });

/** Fails with `what` unless `holds`. */
function check(holds, what) {
  if (!holds) throw new Error(what);
}

/** One grant. */
class Lease {
  constructor(id) {
    this.id = id; // The secret that proves ownership: never log it.
    this.token = 0;
    this.validUntil = 0;
  }

  renewed(sentAt, validity) {
    this.validUntil = sentAt + toMs(validity) - CLOCK_STEP_MS;
  }

  /** Tells whether the lease surely lasts. Check it before each protected step. */
  get isValid() {
    return now() < this.validUntil;
  }
}

/** Acquires the resource, and waits up to WAIT_MS for it. */
async function acquire(locks, holder) {
  // With a lease id of its own, a client may repeat a call that failed: it gets the same grant. A
  // client that gives up instead sends Release with this id.
  const lease = new Lease(randomUUID().replaceAll('-', ''));
  const request = {
    resource: RESOURCE,
    ttl: toDuration(TTL_MS),
    waitTimeout: toDuration(WAIT_MS),
    leaseId: lease.id,
    holder,
  };
  // The validity counts from before the send. The answer may have been under way for long.
  const sentAt = now();
  const response = await call(locks, 'acquire', request, WAIT_MS + CALL_TIMEOUT_MS);
  check(
    response.outcome === 'ACQUIRE_OUTCOME_GRANTED',
    `Acquire of the ${holder} holder ended with ${response.outcome}`,
  );
  lease.token = response.lease.fencingToken;
  lease.renewed(sentAt, response.lease.validity);
  return lease;
}

/** Renews a lease until it is lost or `signal` says to stop. After a failure it opens a new stream. */
async function keepAlive(locks, lease, signal) {
  while (lease.isValid && !signal.aborted) {
    try {
      await renewOverOneStream(locks, lease, signal);
    } catch (error) {
      if (signal.aborted) return;
      console.error(`KeepAlive: ${error.message}`);
      await sleep(TTL_MS / 20);
    }
  }
  console.error('KeepAlive: the lease is over');
}

/** Renews a lease every third of its ttl. It returns when the lease is lost, and throws if the stream fails. */
async function renewOverOneStream(locks, lease, signal) {
  const stream = locks.keepAlive();
  const responses = stream[Symbol.asyncIterator]();
  const silent = () => stream.destroy(new Error('the server did not answer a renewal in time'));
  try {
    for (let sequence = 1; ; sequence++) {
      const sentAt = now();
      stream.write({ resource: RESOURCE, leaseId: lease.id, sequence });
      // A stream has no timeout for one message: end that of a server that does not answer.
      const silence = setTimeout(silent, TTL_MS / 2);
      const { value: response, done } = await responses.next().finally(() => clearTimeout(silence));
      if (done) throw new Error('the server ended the stream');
      switch (response.state) {
        case 'LEASE_STATE_ACTIVE':
          lease.renewed(sentAt, response.validity);
          break;
        case 'LEASE_STATE_AT_RISK':
          // The lease lasts until its known validity ends. The next renewal may succeed.
          break;
        case 'LEASE_STATE_LOST':
          lease.validUntil = 0;
          return;
        default:
          // The server drains, or refuses the request. With several servers, go to another one.
          throw new Error(`not renewed: ${JSON.stringify(response)}`);
      }
      await sleep(TTL_MS / 3, undefined, { signal });
    }
  } finally {
    stream.on('error', () => {}); // The end of a stream that is cancelled here is no news.
    stream.cancel();
  }
}

/** Writes under a token. The storage refuses a token lower than one that it has seen. */
const put = (storage, fencingToken, value) =>
  call(storage, 'put', { resource: RESOURCE, fencingToken, key: 'state', value: Buffer.from(value) });

/** Ends a lease; returns what the server says of it. */
async function release(locks, lease) {
  const response = await call(locks, 'release', { resource: RESOURCE, leaseId: lease.id });
  return response.outcome;
}

async function run(locks, storage) {
  const first = await acquire(locks, 'first');
  console.log(`first holder: acquired ${RESOURCE} with token ${first.token}`);
  const stop = new AbortController();
  const keeper = keepAlive(locks, first, stop.signal);

  await sleep((TTL_MS * 5) / 4);
  check(first.isValid, 'the lease ended although KeepAlive renewed it');
  await put(storage, first.token, 'first');
  console.log('first holder: wrote, after more than one ttl');

  // The first holder stops, as in a long pause: nothing renews its lease any more.
  stop.abort();
  await keeper;
  const second = await acquire(locks, 'second');
  console.log(`second holder: waited, and acquired it with token ${second.token}`);
  check(second.token > first.token, 'a later grant has no greater token');
  check(!first.isValid, 'two leases of one resource are valid');
  await put(storage, second.token, 'second');

  // The first holder wakes up, and writes before it looks at its lease.
  const refusal = await put(storage, first.token, 'stale').then(
    () => check(false, 'the storage accepted a write with a stale token'),
    (error) => error,
  );
  // The status has the details: decide by the reason, never by the message.
  const info = errorInfo(refusal);
  check(
    refusal.code === grpc.status.FAILED_PRECONDITION &&
      info?.domain === 'redfence' &&
      info.reason === 'STALE_TOKEN',
    `the stale write was refused with ${refusal.message}, details ${JSON.stringify(info)}`,
  );
  console.log(
    `first holder: its late write is refused: ${info.reason}, highest token ${info.metadata.highest_token}`,
  );

  check(
    (await release(locks, second)) === 'RELEASE_OUTCOME_RELEASED',
    'Release did not end a lease that was held',
  );
  check(
    (await release(locks, first)) === 'RELEASE_OUTCOME_NOT_HELD',
    'Release ended a lease that was over',
  );
  console.log('second holder: released it');
}

const insecure = grpc.credentials.createInsecure();
const locks = new redfence.v1.LockService(process.env.REDFENCE_SERVER ?? '127.0.0.1:50051', insecure);
const storage = new redfence.storage.v1.StorageService(
  process.env.REDFENCE_STORAGE ?? '127.0.0.1:50052',
  insecure,
);
try {
  await run(locks, storage);
} catch (error) {
  console.error(`the Node example failed: ${error.message}`);
  process.exitCode = 1;
} finally {
  locks.close();
  storage.close();
}
