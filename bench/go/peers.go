package main

import (
	"context"
	"fmt"
	"time"

	"github.com/go-redsync/redsync/v4"
	syncredis "github.com/go-redsync/redsync/v4/redis"
	"github.com/go-redsync/redsync/v4/redis/goredis/v9"
	"github.com/redis/go-redis/v9"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/server/v3/etcdserver/api/v3lock/v3lockpb"
)

// etcd calls etcd's own lock service.
type etcd struct {
	client *clientv3.Client
	locks  v3lockpb.LockClient
	// The lease of each worker, kept alive, if a worker has one lease for all its locks. Otherwise each
	// lock has a new lease, as each lock of redfence has its ttl. The client leaves it to its end: to
	// revoke it would cost etcd more than the rest of the pair.
	kept []clientv3.LeaseID
}

func newEtcd(_ context.Context, addresses []string, _ int) (locker, error) {
	client, err := clientv3.New(clientv3.Config{Endpoints: addresses, DialTimeout: 5 * time.Second})
	if err != nil {
		return nil, err
	}
	return &etcd{client: client, locks: v3lockpb.NewLockClient(client.ActiveConnection())}, nil
}

func newEtcdOneLease(ctx context.Context, addresses []string, workers int) (locker, error) {
	connected, err := newEtcd(ctx, addresses, workers)
	if err != nil {
		return nil, err
	}
	service := connected.(*etcd)
	for range workers {
		lease, err := service.grantLease(ctx)
		if err != nil {
			return nil, err
		}
		renewals, err := service.client.KeepAlive(ctx, lease)
		if err != nil {
			return nil, fmt.Errorf("etcd keeps no lease alive: %w", err)
		}
		go func() {
			for range renewals {
			}
		}()
		service.kept = append(service.kept, lease)
	}
	return service, nil
}

func (e *etcd) grantLease(ctx context.Context) (clientv3.LeaseID, error) {
	lease, err := e.client.Grant(ctx, int64(ttl.Seconds()))
	if err != nil {
		return 0, fmt.Errorf("etcd granted no lease: %w", err)
	}
	return lease.ID, nil
}

func (e *etcd) acquire(ctx context.Context, worker int, resource string) (held, error) {
	var lease clientv3.LeaseID
	if e.kept != nil {
		lease = e.kept[worker]
	} else {
		var err error
		if lease, err = e.grantLease(ctx); err != nil {
			return held{}, err
		}
	}
	answer, err := e.locks.Lock(ctx, &v3lockpb.LockRequest{Name: []byte(resource), Lease: int64(lease)})
	if err != nil {
		return held{}, err
	}
	// The revision rises with every write, so it is etcd's fencing token.
	return held{resource: resource, id: string(answer.Key), token: uint64(answer.Header.Revision)}, nil
}

func (e *etcd) release(ctx context.Context, lock held) error {
	_, err := e.locks.Unlock(ctx, &v3lockpb.UnlockRequest{Key: []byte(lock.id)})
	return err
}

// redlock is redsync over one go-redis client for each node. It grants no fencing token.
type redlock struct{ sync *redsync.Redsync }

func newRedsync(ctx context.Context, addresses []string, workers int) (locker, error) {
	var pools []syncredis.Pool
	for _, url := range addresses {
		options, err := redis.ParseURL(url)
		if err != nil {
			return nil, err
		}
		options.PoolSize = workers
		client := redis.NewClient(options)
		if err := client.Ping(ctx).Err(); err != nil {
			return nil, fmt.Errorf("a node does not answer: %w", err)
		}
		pools = append(pools, goredis.NewPool(client))
	}
	return &redlock{redsync.New(pools...)}, nil
}

func (r *redlock) acquire(ctx context.Context, _ int, resource string) (held, error) {
	// It polls with its default delay of 50 to 250 ms, as often as fits in the wait.
	tries := redsync.WithTries(int(wait / (50 * time.Millisecond)))
	mutex := r.sync.NewMutex(resource, redsync.WithExpiry(ttl), tries)
	return held{resource: resource, mutex: mutex}, mutex.LockContext(ctx)
}

func (r *redlock) release(ctx context.Context, lock held) error {
	released, err := lock.mutex.(*redsync.Mutex).UnlockContext(ctx)
	if err == nil && !released {
		err = fmt.Errorf("no quorum of nodes released it")
	}
	return err
}
