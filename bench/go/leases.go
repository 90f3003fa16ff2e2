package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	redfencev1 "redfence-bench/gen/redfence/v1"
)

const (
	renewalInterval = ttl / 3
	// The client sends the renewals of one tick together.
	renewalTick = 10 * time.Millisecond
	// So many acquires are under way while the client builds up its leases. A failed one is repeated.
	granters, grantTries = 64, 5
)

// keeper holds many leases, and renews each of them every renewalInterval, spread evenly.
type keeper struct {
	client   *session
	length   time.Duration // measured, after every lease was granted and renewed
	mutex    sync.Mutex    // guards what follows
	leases   []lease
	measured leaseResult
	latency  []sample
}

type lease struct {
	lock       held
	validUntil time.Time // zero: not granted yet
	renewing   bool
	lost       bool
}

// leaseResult is what the harness reads. `lost` counts from the grants, the others in the measured time.
type leaseResult struct {
	Seconds  float64 `json:"seconds"`
	Leases   int     `json:"leases"`
	Lost     int     `json:"lost"`     // refused, or renewed only after their validity
	Renewals int     `json:"renewals"` // answered
	AtRisk   int     `json:"at_risk"`  // of these, those that renewed nothing
	CPU      float64 `json:"cpu_s"`    // the client's own
	Renewal  latency `json:"renewal"`
}

func keepLeases(ctx context.Context, addresses []string, count int, length time.Duration) (*leaseResult, error) {
	client, err := newSession(ctx, addresses, granters)
	if err != nil {
		return nil, err
	}
	kept := &keeper{client: client.(*session), length: length, leases: make([]lease, count)}
	return kept.run(ctx)
}

func (k *keeper) run(ctx context.Context) (*leaseResult, error) {
	stop := make(chan struct{})
	var renewing sync.WaitGroup
	renewing.Go(func() { k.renewAll(stop, &renewing) })
	if err := k.grantAll(ctx); err != nil {
		return nil, err
	}
	time.Sleep(renewalInterval)
	begin := time.Now()
	k.mutex.Lock()
	k.measured, k.latency = leaseResult{}, nil
	k.mutex.Unlock()
	cpu := announce(begin, begin.Add(k.length))
	k.mutex.Lock()
	result, answered := k.measured, k.latency
	k.mutex.Unlock()
	close(stop)
	renewing.Wait()
	if len(answered) == 0 {
		return nil, fmt.Errorf("no renewal was answered within %v", k.length)
	}
	result.Seconds, result.CPU, result.Leases = k.length.Seconds(), cpu.Seconds(), len(k.leases)
	result.Renewal = latencyOf(answered, func(each sample) time.Duration { return each.pair })
	for _, each := range k.leases {
		if each.lost || each.validUntil.Before(begin.Add(k.length)) {
			result.Lost++
		}
	}
	return &result, nil
}

// grantAll acquires every lease once. They are renewed meanwhile.
func (k *keeper) grantAll(ctx context.Context) error {
	failures := make([]error, granters)
	var granting sync.WaitGroup
	for granter := range granters {
		granting.Go(func() {
			for number := granter; number < len(k.leases); number += granters {
				if failures[granter] = k.grant(ctx, number); failures[granter] != nil {
					return
				}
			}
		})
	}
	granting.Wait()
	return errors.Join(failures...)
}

func (k *keeper) grant(ctx context.Context, number int) error {
	var failure error
	for range grantTries {
		sentAt := time.Now()
		lock, err := k.client.acquire(ctx, number, resourceOf(number))
		if err == nil {
			k.mutex.Lock()
			defer k.mutex.Unlock()
			k.leases[number].lock, k.leases[number].validUntil = lock, sentAt.Add(ttl)
			return nil
		}
		failure = err
	}
	return fmt.Errorf("lease %d was not granted: %w", number, failure)
}

// renewAll gives each lease its instant in the interval. A lease has at most one renewal under way.
func (k *keeper) renewAll(stop <-chan struct{}, renewing *sync.WaitGroup) {
	start, next := time.Now(), 0
	for {
		select {
		case <-stop:
			return
		case <-time.After(renewalTick):
		}
		due := int(float64(time.Since(start)) / float64(renewalInterval) * float64(len(k.leases)))
		for ; next < due; next++ {
			k.mutex.Lock()
			each := &k.leases[next%len(k.leases)]
			ready := !each.validUntil.IsZero() && !each.renewing && !each.lost
			each.renewing = each.renewing || ready
			k.mutex.Unlock()
			if ready {
				renewing.Go(func() { k.renew(each) })
			}
		}
	}
}

func (k *keeper) renew(each *lease) {
	sentAt := time.Now()
	state, validity, err := k.client.renew(each.lock)
	answeredAt := time.Now()
	k.mutex.Lock()
	defer k.mutex.Unlock()
	each.renewing = false
	k.measured.Renewals++
	k.latency = append(k.latency, sample{pair: answeredAt.Sub(sentAt)})
	switch {
	case state == redfencev1.LeaseState_LEASE_STATE_LOST || answeredAt.After(each.validUntil):
		each.lost = true
	case err == nil && state == redfencev1.LeaseState_LEASE_STATE_ACTIVE:
		each.validUntil = sentAt.Add(validity)
	default: // the lease lasts until its known validity ends
		k.measured.AtRisk++
	}
}
