package main

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"net"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/types/known/durationpb"

	redfencev1 "redfence-bench/gen/redfence/v1"
)

// machines lets each connection come from a loopback address of its own, as from another machine.
var machines bool

// newLeaseID returns the secret of one lease, as every client of redfence chooses it.
func newLeaseID() string {
	var id [16]byte
	rand.Read(id[:]) // it never fails
	return hex.EncodeToString(id[:])
}

func acquireRequest(resource, leaseID string) *redfencev1.AcquireRequest {
	return &redfencev1.AcquireRequest{
		Resource:    resource,
		Ttl:         durationpb.New(ttl),
		WaitTimeout: durationpb.New(wait),
		LeaseId:     leaseID,
		Holder:      "bench",
	}
}

func grantOf(answer *redfencev1.AcquireResponse, resource string) (held, error) {
	if answer.GetOutcome() != redfencev1.AcquireOutcome_ACQUIRE_OUTCOME_GRANTED {
		return held{}, fmt.Errorf("the outcome is %v", answer.GetOutcome())
	}
	return held{resource: resource, id: answer.Lease.LeaseId, token: answer.Lease.FencingToken}, nil
}

func checkReleased(answer *redfencev1.ReleaseResponse) error {
	if answer.GetOutcome() != redfencev1.ReleaseOutcome_RELEASE_OUTCOME_RELEASED {
		return fmt.Errorf("the outcome is %v", answer.GetOutcome())
	}
	return nil
}

// connectAll opens one connection to each address. An address that is given twice gets two, which
// spreads the load over the processes of one port, or over as many machines.
func connectAll(addresses []string) ([]redfencev1.LockServiceClient, error) {
	var stubs []redfencev1.LockServiceClient
	for number, address := range addresses {
		options := []grpc.DialOption{grpc.WithTransportCredentials(insecure.NewCredentials())}
		if machines {
			source := &net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 1, byte(number+1))}}
			options = append(options, grpc.WithContextDialer(
				func(ctx context.Context, address string) (net.Conn, error) {
					return source.DialContext(ctx, "tcp", address)
				}))
		}
		connection, err := grpc.NewClient(address, options...)
		if err != nil {
			return nil, err
		}
		stubs = append(stubs, redfencev1.NewLockServiceClient(connection))
	}
	return stubs, nil
}

// unary calls the generated stubs, one call for each step.
type unary struct {
	stubs []redfencev1.LockServiceClient
}

func newUnary(_ context.Context, addresses []string, _ int) (locker, error) {
	stubs, err := connectAll(addresses)
	return &unary{stubs}, err
}

func (u *unary) acquire(ctx context.Context, worker int, resource string) (held, error) {
	answer, err := u.stubs[worker%len(u.stubs)].Acquire(ctx, acquireRequest(resource, newLeaseID()))
	if err != nil {
		return held{}, err
	}
	lock, err := grantOf(answer, resource)
	lock.mutex = worker
	return lock, err
}

func (u *unary) release(ctx context.Context, lock held) error {
	request := &redfencev1.ReleaseRequest{Resource: lock.resource, LeaseId: lock.id}
	answer, err := u.stubs[lock.mutex.(int)%len(u.stubs)].Release(ctx, request)
	if err != nil {
		return err
	}
	return checkReleased(answer)
}
