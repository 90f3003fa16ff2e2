package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// load is a closed loop: each worker acquires, releases, and begins again. With a rate it is an open
// loop: a pair begins at each instant of the rate, whether or not the earlier pairs have ended.
type load struct {
	workers        int
	shared         bool    // all workers share one resource
	rate           float64 // pairs per second of the open loop; 0: a closed loop
	warmUp, length time.Duration
}

// result is what the harness reads.
type result struct {
	Seconds   float64 `json:"seconds"`
	Pairs     int     `json:"pairs"`
	HandOvers int     `json:"hand_overs"` // grants to another worker than the one before
	CPU       float64 `json:"cpu_s"`      // the client's own
	Pair      latency `json:"pair"`
	Acquire   latency `json:"acquire"`
}

// latency tells milliseconds.
type latency struct {
	P50  float64 `json:"p50_ms"`
	P99  float64 `json:"p99_ms"`
	P999 float64 `json:"p99_9_ms"`
	Max  float64 `json:"max_ms"`
}

// sample is one pair inside the measured time.
type sample struct {
	acquire, pair time.Duration
}

func (l load) run(ctx context.Context, client locker) (*result, error) {
	begin := time.Now().Add(l.warmUp)
	end := begin.Add(l.length)
	var announcing sync.WaitGroup
	var cpu time.Duration
	announcing.Go(func() { cpu = announce(begin, end) })
	holders := holderCount{last: -1, begin: begin, end: end}
	var samples []sample
	var err error
	if l.rate > 0 {
		samples, err = l.open(ctx, client, begin, end)
	} else {
		samples, err = l.closed(ctx, client, &holders, begin, end)
	}
	if err != nil {
		return nil, err
	}
	announcing.Wait()
	if len(samples) == 0 {
		return nil, fmt.Errorf("no worker completed a pair within %v", l.length)
	}
	return &result{
		Seconds:   l.length.Seconds(),
		Pairs:     len(samples),
		HandOvers: int(holders.changes.Load()),
		CPU:       cpu.Seconds(),
		Pair:      latencyOf(samples, func(each sample) time.Duration { return each.pair }),
		Acquire:   latencyOf(samples, func(each sample) time.Duration { return each.acquire }),
	}, nil
}

// announce tells the harness when to read the CPU times of the service, and returns the client's own.
func announce(begin, end time.Time) time.Duration {
	time.Sleep(time.Until(begin))
	fmt.Println("begin")
	before := ownCPU()
	time.Sleep(time.Until(end))
	fmt.Println("end")
	return ownCPU() - before
}

func ownCPU() time.Duration {
	var usage syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage); err != nil {
		panic(err)
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}

func (l load) closed(ctx context.Context, client locker, holders *holderCount, begin, end time.Time) ([]sample, error) {
	samples := make([][]sample, l.workers)
	failures := make([]error, l.workers)
	var running sync.WaitGroup
	for worker := range l.workers {
		running.Go(func() {
			samples[worker], failures[worker] = l.work(ctx, client, worker, holders, begin, end)
		})
	}
	running.Wait()
	return slices.Concat(samples...), errors.Join(failures...)
}

func (l load) work(ctx context.Context, client locker, worker int, holders *holderCount, begin, end time.Time) ([]sample, error) {
	resource := resourceOf(worker)
	if l.shared {
		resource = "bench/one"
	}
	var samples []sample
	var lastToken uint64
	for {
		startedAt := time.Now()
		if startedAt.After(end) {
			return samples, nil
		}
		taken, err := pair(ctx, client, worker, resource, startedAt, func(lock held, grantedAt time.Time) error {
			if lock.token != 0 && lock.token <= lastToken {
				return fmt.Errorf("%s: token %d was granted after %d", resource, lock.token, lastToken)
			}
			lastToken = lock.token
			if l.shared {
				holders.observe(worker, grantedAt)
			}
			return nil
		})
		if err != nil {
			return nil, err
		}
		if releasedAt := startedAt.Add(taken.pair); releasedAt.After(begin) && releasedAt.Before(end) {
			samples = append(samples, taken)
		}
	}
}

func resourceOf(worker int) string { return fmt.Sprintf("bench/%d", worker) }

// pair acquires and releases once. Its latencies count from startedAt.
func pair(ctx context.Context, client locker, worker int, resource string, startedAt time.Time, onGrant func(held, time.Time) error) (sample, error) {
	lock, err := client.acquire(ctx, worker, resource)
	if err != nil {
		return sample{}, fmt.Errorf("worker %d could not acquire %s: %w", worker, resource, err)
	}
	grantedAt := time.Now()
	if err := onGrant(lock, grantedAt); err != nil {
		return sample{}, err
	}
	if err := client.release(ctx, lock); err != nil {
		return sample{}, fmt.Errorf("worker %d could not release %s: %w", worker, resource, err)
	}
	return sample{acquire: grantedAt.Sub(startedAt), pair: time.Since(startedAt)}, nil
}

// holderCount counts the grants of the measured time whose holder is not the previous holder. The
// lock itself orders its calls: only a holder observes.
type holderCount struct {
	mutex      sync.Mutex
	last       int
	begin, end time.Time
	changes    atomic.Int64
}

func (h *holderCount) observe(worker int, at time.Time) {
	h.mutex.Lock()
	defer h.mutex.Unlock()
	if worker != h.last && at.After(h.begin) && at.Before(h.end) {
		h.changes.Add(1)
	}
	h.last = worker
}

func latencyOf(samples []sample, of func(sample) time.Duration) latency {
	sorted := make([]time.Duration, len(samples))
	for index, each := range samples {
		sorted[index] = of(each)
	}
	slices.Sort(sorted)
	at := func(share float64) float64 {
		return float64(sorted[min(len(sorted)-1, int(float64(len(sorted))*share))].Microseconds()) / 1000
	}
	return latency{P50: at(0.5), P99: at(0.99), P999: at(0.999), Max: at(1)}
}
