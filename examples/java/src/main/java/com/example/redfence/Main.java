package com.example.redfence;

import com.google.protobuf.Any;
import com.google.protobuf.ByteString;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.protobuf.util.Durations;
import com.google.rpc.ErrorInfo;
import com.redfence.storage.v1.PutRequest;
import com.redfence.storage.v1.StorageServiceGrpc;
import com.redfence.storage.v1.StorageServiceGrpc.StorageServiceBlockingStub;
import com.redfence.v1.AcquireOutcome;
import com.redfence.v1.AcquireRequest;
import com.redfence.v1.LockServiceGrpc;
import com.redfence.v1.LockServiceGrpc.LockServiceBlockingStub;
import com.redfence.v1.ReleaseOutcome;
import com.redfence.v1.ReleaseRequest;
import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.grpc.ManagedChannel;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.protobuf.StatusProto;
import java.time.Duration;
import java.util.UUID;
import java.util.concurrent.TimeUnit;

/**
 * A lock with fencing tokens, from Java. Every step checks what redfence promises.
 *
 * <p>REDFENCE_SERVER and REDFENCE_STORAGE name the servers; {@code redfence dev} starts both.
 */
public final class Main {
    static final String RESOURCE = "examples/java";
    static final Duration TTL = Duration.ofSeconds(4);
    static final Duration WAIT = Duration.ofSeconds(10);
    static final Duration CALL_TIMEOUT = Duration.ofSeconds(5);

    public static void main(String[] arguments) throws InterruptedException {
        ManagedChannel lockChannel = connect("REDFENCE_SERVER", "127.0.0.1:50051");
        ManagedChannel storageChannel = connect("REDFENCE_STORAGE", "127.0.0.1:50052");
        int exitStatus = 0;
        try {
            run(lockChannel, storageChannel);
        } catch (StatusRuntimeException | IllegalStateException error) {
            System.err.println("the Java example failed: " + error.getMessage());
            exitStatus = 1;
        } finally {
            lockChannel.shutdownNow().awaitTermination(5, TimeUnit.SECONDS);
            storageChannel.shutdownNow().awaitTermination(5, TimeUnit.SECONDS);
        }
        System.exit(exitStatus);
    }

    private static void run(ManagedChannel lockChannel, ManagedChannel storageChannel)
            throws InterruptedException {
        LockServiceBlockingStub locks = LockServiceGrpc.newBlockingStub(lockChannel);
        StorageServiceBlockingStub storage = StorageServiceGrpc.newBlockingStub(storageChannel);

        Lease first = acquire(locks, "first");
        System.out.printf("first holder: acquired %s with token %d%n", RESOURCE, first.token());
        try (var keeper = new LeaseKeeper(LockServiceGrpc.newStub(lockChannel), RESOURCE, TTL, first)) {
            Thread.sleep(TTL.toMillis() * 5 / 4);
            check(first.isValid(), "the lease ended although KeepAlive renewed it");
            put(storage, first.token(), "first");
            System.out.println("first holder: wrote, after more than one ttl");
        }

        // The first holder stops, as in a long garbage collection: nothing renews its lease any more.
        Lease second = acquire(locks, "second");
        System.out.printf("second holder: waited, and acquired it with token %d%n", second.token());
        check(second.token() > first.token(), "a later grant has no greater token");
        check(!first.isValid(), "two leases of one resource are valid");
        put(storage, second.token(), "second");

        // The first holder wakes up, and writes before it looks at its lease.
        try {
            put(storage, first.token(), "stale");
            throw new IllegalStateException("the storage accepted a write with a stale token");
        } catch (StatusRuntimeException refusal) {
            // The status has the details: decide by the reason, never by the message.
            ErrorInfo info = errorInfo(refusal);
            check(
                    refusal.getStatus().getCode() == Status.Code.FAILED_PRECONDITION
                            && info.getDomain().equals("redfence")
                            && info.getReason().equals("STALE_TOKEN"),
                    "the stale write was refused with " + refusal.getMessage() + ", details " + info);
            System.out.printf(
                    "first holder: its late write is refused: %s, highest token %s%n",
                    info.getReason(), info.getMetadataOrThrow("highest_token"));
        }

        check(
                release(locks, second) == ReleaseOutcome.RELEASE_OUTCOME_RELEASED,
                "Release did not end a lease that was held");
        check(
                release(locks, first) == ReleaseOutcome.RELEASE_OUTCOME_NOT_HELD,
                "Release ended a lease that was over");
        System.out.println("second holder: released it");
    }

    /** Acquires the resource, and waits up to WAIT for it. */
    private static Lease acquire(LockServiceBlockingStub locks, String holder) {
        // With a lease id of its own, a client may repeat a call that failed: it gets the same grant. A
        // client that gives up instead sends Release with this id.
        String id = UUID.randomUUID().toString().replace("-", "");
        var request = AcquireRequest.newBuilder()
                .setResource(RESOURCE)
                .setTtl(Durations.fromMillis(TTL.toMillis()))
                .setWaitTimeout(Durations.fromMillis(WAIT.toMillis()))
                .setLeaseId(id)
                .setHolder(holder)
                .build();
        // The validity counts from before the send. The answer may have been under way for long.
        var sentAt = BootClock.now();
        // Without a deadline, a call to a frozen server never ends.
        var response = locks.withDeadlineAfter(WAIT.plus(CALL_TIMEOUT)).acquire(request);
        check(
                response.getOutcome() == AcquireOutcome.ACQUIRE_OUTCOME_GRANTED,
                "Acquire of the " + holder + " holder ended with " + response.getOutcome());
        var granted = response.getLease();
        return new Lease(id, granted.getFencingToken(), sentAt, granted.getValidity());
    }

    /** Writes under a token. The storage refuses a token lower than one that it has seen. */
    private static void put(StorageServiceBlockingStub storage, long token, String value) {
        var request = PutRequest.newBuilder()
                .setResource(RESOURCE)
                .setFencingToken(token)
                .setKey("state")
                .setValue(ByteString.copyFromUtf8(value))
                .build();
        storage.withDeadlineAfter(CALL_TIMEOUT).put(request);
    }

    /** Ends a lease; returns what the server says of it. */
    private static ReleaseOutcome release(LockServiceBlockingStub locks, Lease lease) {
        var request = ReleaseRequest.newBuilder()
                .setResource(RESOURCE)
                .setLeaseId(lease.id())
                .build();
        return locks.withDeadlineAfter(CALL_TIMEOUT).release(request).getOutcome();
    }

    /** Returns the ErrorInfo in the details of a status; an empty one if there is none. */
    private static ErrorInfo errorInfo(StatusRuntimeException error) {
        for (Any detail : StatusProto.fromThrowable(error).getDetailsList()) {
            if (detail.is(ErrorInfo.class)) {
                try {
                    return detail.unpack(ErrorInfo.class);
                } catch (InvalidProtocolBufferException malformed) {
                    throw new IllegalStateException(malformed);
                }
            }
        }
        return ErrorInfo.getDefaultInstance();
    }

    private static void check(boolean holds, String what) {
        if (!holds) {
            throw new IllegalStateException(what);
        }
    }

    private static ManagedChannel connect(String variable, String otherwise) {
        String address = System.getenv().getOrDefault(variable, otherwise);
        return Grpc.newChannelBuilder(address, InsecureChannelCredentials.create()).build();
    }
}
