// A lock with fencing tokens, from Go. Every step checks what redfence promises.
//
// REDFENCE_SERVER and REDFENCE_STORAGE name the servers; `redfence dev` starts both. For TLS,
// REDFENCE_TLS_CA names the PEM file of their authority; REDFENCE_TLS_CERT and REDFENCE_TLS_KEY name
// those of the client's own certificate.
package main

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"golang.org/x/sys/unix"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	storagev1 "redfence-example/gen/redfence/storage/v1"
	redfencev1 "redfence-example/gen/redfence/v1"
)

const (
	resource    = "examples/go"
	ttl         = 4 * time.Second
	wait        = 10 * time.Second
	callTimeout = 5 * time.Second
)

// now returns the time since boot, on a clock that runs on in suspend. The monotonic clock of the
// package time stops there on Linux, so a lease would seem valid for too long.
func now() time.Duration {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &t); err != nil {
		panic(err)
	}
	return time.Duration(t.Nano())
}

// Lease is one grant.
type Lease struct {
	id         string // the secret that proves ownership: never log it
	token      uint64
	validUntil atomic.Int64 // when the lease ends by now(); keepAlive moves it
}

// IsValid tells whether the lease surely lasts. Check it before each protected step.
func (l *Lease) IsValid() bool { return now() < time.Duration(l.validUntil.Load()) }

// acquire acquires the resource, and waits up to `wait` for it.
func acquire(ctx context.Context, locks redfencev1.LockServiceClient, holder string) (*Lease, error) {
	// Without a deadline, a call to a frozen server never ends.
	ctx, cancel := context.WithTimeout(ctx, wait+callTimeout)
	defer cancel()
	// With a lease id of its own, a client may repeat a call that failed: it gets the same grant. A
	// client that gives up instead sends Release with this id.
	id := uuid.New()
	lease := &Lease{id: hex.EncodeToString(id[:])}
	// The validity counts from before the send. The answer may have been under way for long.
	sentAt := now()
	response, err := locks.Acquire(ctx, &redfencev1.AcquireRequest{
		Resource:    resource,
		Ttl:         durationpb.New(ttl),
		WaitTimeout: durationpb.New(wait),
		LeaseId:     lease.id,
		Holder:      holder,
	})
	if err != nil {
		return nil, fmt.Errorf("Acquire of the %s holder: %w", holder, err)
	}
	if response.Outcome != redfencev1.AcquireOutcome_ACQUIRE_OUTCOME_GRANTED {
		return nil, fmt.Errorf("Acquire of the %s holder ended with %v", holder, response.Outcome)
	}
	lease.token = response.Lease.FencingToken
	lease.validUntil.Store(int64(sentAt + response.Lease.Validity.AsDuration()))
	return lease, nil
}

// keepAlive renews a lease until it is lost or ctx is done. After a failure it opens a new stream.
func keepAlive(ctx context.Context, locks redfencev1.LockServiceClient, lease *Lease) {
	for ctx.Err() == nil && lease.IsValid() {
		if err := renewOverOneStream(ctx, locks, lease); err != nil && ctx.Err() == nil {
			fmt.Fprintln(os.Stderr, "KeepAlive:", err)
			time.Sleep(ttl / 20)
		}
	}
	if ctx.Err() == nil {
		fmt.Fprintln(os.Stderr, "KeepAlive: the lease is over")
	}
}

var errSilent = errors.New("the server did not answer a renewal in time")

// renewOverOneStream renews a lease every third of its ttl. It returns nil when the lease is lost.
func renewOverOneStream(ctx context.Context, locks redfencev1.LockServiceClient, lease *Lease) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stream, err := locks.KeepAlive(ctx)
	if err != nil {
		return err
	}
	ticks := time.NewTicker(ttl / 3)
	defer ticks.Stop()
	for sequence := uint64(1); ; sequence++ {
		// Recv has no timeout of its own: end the stream of a server that does not answer.
		silence := time.AfterFunc(ttl/2, func() { cancel(errSilent) })
		sentAt := now()
		err := stream.Send(&redfencev1.KeepAliveRequest{
			Resource: resource, LeaseId: lease.id, Sequence: sequence,
		})
		if err != nil {
			return err
		}
		response, err := stream.Recv()
		silence.Stop()
		if err != nil {
			return cmp.Or(context.Cause(ctx), err)
		}
		switch response.State {
		case redfencev1.LeaseState_LEASE_STATE_ACTIVE:
			lease.validUntil.Store(int64(sentAt + response.Validity.AsDuration()))
		case redfencev1.LeaseState_LEASE_STATE_AT_RISK:
			// The lease lasts until its known validity ends. The next renewal may succeed.
		case redfencev1.LeaseState_LEASE_STATE_LOST:
			lease.validUntil.Store(0)
			return nil
		default:
			// The server drains, or refuses the request. With several servers, go to another one.
			return fmt.Errorf("not renewed: %v", response)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-ticks.C:
		}
	}
}

// put writes under a token. The storage refuses a token lower than one that it has seen.
func put(ctx context.Context, storage storagev1.StorageServiceClient, token uint64, value string) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	_, err := storage.Put(ctx, &storagev1.PutRequest{
		Resource: resource, FencingToken: token, Key: "state", Value: []byte(value),
	})
	return err
}

// release ends a lease, and fails unless the server tells the expected outcome.
func release(ctx context.Context, locks redfencev1.LockServiceClient, lease *Lease, expected redfencev1.ReleaseOutcome) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	response, err := locks.Release(ctx, &redfencev1.ReleaseRequest{Resource: resource, LeaseId: lease.id})
	if err != nil {
		return fmt.Errorf("Release: %w", err)
	}
	if response.Outcome != expected {
		return fmt.Errorf("Release ended with %v, not with %v", response.Outcome, expected)
	}
	return nil
}

// errorInfo returns the ErrorInfo in the details of a status, or nil.
func errorInfo(err error) *errdetails.ErrorInfo {
	for _, detail := range status.Convert(err).Details() {
		if info, ok := detail.(*errdetails.ErrorInfo); ok {
			return info
		}
	}
	return nil
}

func transport() (credentials.TransportCredentials, error) {
	ca := os.Getenv("REDFENCE_TLS_CA")
	if ca == "" {
		return insecure.NewCredentials(), nil
	}
	pem, err := os.ReadFile(ca)
	if err != nil {
		return nil, err
	}
	config := &tls.Config{RootCAs: x509.NewCertPool()}
	if !config.RootCAs.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("%s has no certificate", ca)
	}
	if file := os.Getenv("REDFENCE_TLS_CERT"); file != "" {
		// Read again for each connection, so that a renewed certificate needs no restart.
		config.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			own, err := tls.LoadX509KeyPair(file, os.Getenv("REDFENCE_TLS_KEY"))
			return &own, err
		}
	}
	return credentials.NewTLS(config), nil
}

func connect(variable, otherwise string) (*grpc.ClientConn, error) {
	security, err := transport()
	if err != nil {
		return nil, err
	}
	return grpc.NewClient(cmp.Or(os.Getenv(variable), otherwise), grpc.WithTransportCredentials(security))
}

func run(ctx context.Context) error {
	lockConn, err := connect("REDFENCE_SERVER", "127.0.0.1:50051")
	if err != nil {
		return err
	}
	defer lockConn.Close()
	storageConn, err := connect("REDFENCE_STORAGE", "127.0.0.1:50052")
	if err != nil {
		return err
	}
	defer storageConn.Close()
	locks := redfencev1.NewLockServiceClient(lockConn)
	storage := storagev1.NewStorageServiceClient(storageConn)

	first, err := acquire(ctx, locks, "first")
	if err != nil {
		return err
	}
	fmt.Printf("first holder: acquired %s with token %d\n", resource, first.token)
	keeping, stopKeeping := context.WithCancel(ctx)
	defer stopKeeping()
	kept := make(chan struct{})
	go func() {
		defer close(kept)
		keepAlive(keeping, locks, first)
	}()

	time.Sleep(ttl * 5 / 4)
	if !first.IsValid() {
		return errors.New("the lease ended although KeepAlive renewed it")
	}
	if err := put(ctx, storage, first.token, "first"); err != nil {
		return fmt.Errorf("Put of the first holder: %w", err)
	}
	fmt.Println("first holder: wrote, after more than one ttl")

	// The first holder stops, as in a long pause: nothing renews its lease any more.
	stopKeeping()
	<-kept
	second, err := acquire(ctx, locks, "second")
	if err != nil {
		return err
	}
	fmt.Printf("second holder: waited, and acquired it with token %d\n", second.token)
	if second.token <= first.token {
		return fmt.Errorf("a later grant has no greater token: %d after %d", second.token, first.token)
	}
	if first.IsValid() {
		return errors.New("two leases of one resource are valid")
	}
	if err := put(ctx, storage, second.token, "second"); err != nil {
		return fmt.Errorf("Put of the second holder: %w", err)
	}

	// The first holder wakes up, and writes before it looks at its lease.
	refusal := put(ctx, storage, first.token, "stale")
	if refusal == nil {
		return errors.New("the storage accepted a write with a stale token")
	}
	// The status has the details: decide by the reason, never by the message.
	info := errorInfo(refusal)
	if status.Code(refusal) != codes.FailedPrecondition || info.GetDomain() != "redfence" || info.GetReason() != "STALE_TOKEN" {
		return fmt.Errorf("the stale write was refused with %w, details %v", refusal, info)
	}
	fmt.Printf("first holder: its late write is refused: %s, highest token %s\n", info.Reason, info.Metadata["highest_token"])

	if err := release(ctx, locks, second, redfencev1.ReleaseOutcome_RELEASE_OUTCOME_RELEASED); err != nil {
		return err
	}
	if err := release(ctx, locks, first, redfencev1.ReleaseOutcome_RELEASE_OUTCOME_NOT_HELD); err != nil {
		return err
	}
	fmt.Println("second holder: released it")
	return nil
}

func main() {
	if err := run(context.Background()); err != nil {
		fmt.Fprintln(os.Stderr, "the Go example failed:", err)
		os.Exit(1)
	}
}
