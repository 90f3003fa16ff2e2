package com.example.redfence;

import com.google.protobuf.util.Durations;
import java.time.Duration;

/** One grant. */
final class Lease {
    private final String id;
    private final long token;
    private volatile Duration validUntil; // by BootClock

    /** Takes what an Acquire was granted, and when it was sent. */
    Lease(String id, long token, Duration sentAt, com.google.protobuf.Duration validity) {
        this.id = id;
        this.token = token;
        renewed(sentAt, validity);
    }

    /** Returns the secret that proves ownership: never log it. */
    String id() {
        return id;
    }

    long token() {
        return token;
    }

    /** Tells whether the lease surely lasts. Check it before each protected step. */
    boolean isValid() {
        return BootClock.now().compareTo(validUntil) < 0;
    }

    void renewed(Duration sentAt, com.google.protobuf.Duration validity) {
        validUntil = sentAt.plusNanos(Durations.toNanos(validity)).minus(BootClock.STEP);
    }

    void lost() {
        validUntil = Duration.ZERO;
    }
}
