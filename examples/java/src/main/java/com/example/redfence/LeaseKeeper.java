package com.example.redfence;

import com.redfence.v1.KeepAliveRequest;
import com.redfence.v1.KeepAliveResponse;
import com.redfence.v1.LockServiceGrpc.LockServiceStub;
import io.grpc.Status;
import io.grpc.stub.StreamObserver;
import java.time.Duration;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;

/** Renews a lease in the background, until it is lost or this is closed. Closing does not release it. */
final class LeaseKeeper implements AutoCloseable {
    private final LockServiceStub locks;
    private final String resource;
    private final Duration ttl;
    private final Lease lease;
    private final Thread thread = new Thread(this::renew, "lease-keeper");

    LeaseKeeper(LockServiceStub locks, String resource, Duration ttl, Lease lease) {
        this.locks = locks;
        this.resource = resource;
        this.ttl = ttl;
        this.lease = lease;
        thread.setDaemon(true);
        thread.start();
    }

    @Override
    public void close() throws InterruptedException {
        thread.interrupt();
        thread.join();
    }

    /** After a failure it opens a new stream. */
    private void renew() {
        try {
            while (lease.isValid()) {
                String failure = renewOverOneStream();
                System.err.println("KeepAlive: " + failure);
                Thread.sleep(ttl.toMillis() / 20);
            }
            System.err.println("KeepAlive: the lease is over");
        } catch (InterruptedException closed) {
            // The owner of the lease wants no more renewals.
        }
    }

    /** Renews the lease every third of its ttl; returns why it stopped. */
    private String renewOverOneStream() throws InterruptedException {
        var events = new Events();
        StreamObserver<KeepAliveRequest> requests = locks.keepAlive(events);
        try {
            for (long sequence = 1; ; sequence++) {
                var sentAt = BootClock.now();
                requests.onNext(KeepAliveRequest.newBuilder()
                        .setResource(resource)
                        .setLeaseId(lease.id())
                        .setSequence(sequence)
                        .build());
                Object event = events.received.poll(ttl.toMillis() / 2, TimeUnit.MILLISECONDS);
                if (!(event instanceof KeepAliveResponse response)) {
                    return event == null ? "the server did not answer a renewal in time" : event.toString();
                }
                switch (response.getState()) {
                    case LEASE_STATE_ACTIVE -> lease.renewed(sentAt, response.getValidity());
                    case LEASE_STATE_AT_RISK -> {
                        // The lease lasts until its known validity ends. The next renewal may succeed.
                    }
                    case LEASE_STATE_LOST -> {
                        lease.lost();
                        return "a quorum no longer holds the lease";
                    }
                    // The server drains, or refuses the request. With several servers, go to another one.
                    default -> {
                        return "not renewed: " + response;
                    }
                }
                Thread.sleep(ttl.toMillis() / 3);
            }
        } finally {
            requests.onError(Status.CANCELLED.asException());
        }
    }

    /** What the stream receives: a response, or the Status that ended it. */
    private static final class Events implements StreamObserver<KeepAliveResponse> {
        final BlockingQueue<Object> received = new LinkedBlockingQueue<>();

        @Override
        public void onNext(KeepAliveResponse response) {
            received.add(response);
        }

        @Override
        public void onError(Throwable error) {
            received.add(Status.fromThrowable(error));
        }

        @Override
        public void onCompleted() {
            received.add(Status.OK);
        }
    }
}
