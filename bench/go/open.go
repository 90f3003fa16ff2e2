package main

import (
	"context"
	"errors"
	"sync"
	"syscall"
	"time"
)

// open begins a pair at each instant of the rate. A latency counts from that instant: so a late start,
// of the client too, is not hidden. It returns every pair that was to begin in the measured time.
func (l load) open(ctx context.Context, client locker, begin, end time.Time) ([]sample, error) {
	first := begin.Add(-l.warmUp)
	interval := time.Duration(float64(time.Second) / l.rate)
	skipped, total := int(l.warmUp/interval), int(end.Sub(first)/interval)
	samples := make([]sample, total)
	failures := make([]error, total)
	var running sync.WaitGroup
	for number := range total {
		intended := first.Add(time.Duration(number) * interval)
		sleepUntil(intended)
		running.Go(func() {
			worker := number % l.workers
			samples[number], failures[number] = pair(
				ctx, client, worker, resourceOf(worker), intended, func(held, time.Time) error { return nil },
			)
		})
	}
	running.Wait()
	return samples[skipped:], errors.Join(failures...)
}

// sleepUntil is exact to about 0.1 ms. time.Sleep may be 1 ms late in an idle program.
func sleepUntil(instant time.Time) {
	for left := time.Until(instant); left > 0; left = time.Until(instant) {
		duration := syscall.NsecToTimespec(left.Nanoseconds())
		syscall.Nanosleep(&duration, nil) // a signal may end it early
	}
}
