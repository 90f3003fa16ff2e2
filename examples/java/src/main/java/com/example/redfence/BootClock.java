package com.example.redfence;

import java.io.IOException;
import java.io.UncheckedIOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;

/**
 * The time since boot, on a clock of Linux that runs on in suspend.
 *
 * <p>{@code System.nanoTime} stops there, so a lease would seem valid for too long. For other systems see
 * "Clocks" in lock.proto.
 */
final class BootClock {
    /** How far the clock may be behind: it moves in steps. */
    static final Duration STEP = Duration.ofMillis(10);

    private static final Path UPTIME = Path.of("/proc/uptime");

    private BootClock() {}

    static Duration now() {
        try {
            double seconds = Double.parseDouble(Files.readString(UPTIME).split(" ")[0]);
            return Duration.ofMillis(Math.round(seconds * 1000));
        } catch (IOException error) {
            throw new UncheckedIOException("cannot read " + UPTIME, error);
        }
    }
}
