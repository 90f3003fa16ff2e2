// Loads one lock service with workers that acquire and release, and prints one line of JSON.
//
// The line `begin` says that the warm-up is over, `end` that the measured time is. Between them, the
// harness reads the CPU time of every process.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"time"
)

// Every lease of the comparison has this ttl, and every acquire waits up to `wait`.
const (
	ttl  = 30 * time.Second
	wait = 60 * time.Second
)

// A locker is a client of one lock service. Every method is safe for concurrent use.
type locker interface {
	// acquire waits for the resource as the service's own lock call does. A worker holds at most one lock.
	acquire(ctx context.Context, worker int, resource string) (held, error)
	release(ctx context.Context, lock held) error
}

// held is one grant.
type held struct {
	resource string
	id       string // proves the ownership to the service
	token    uint64 // 0 where the service has no fencing token
	mutex    any    // the service's own object, if it has one
}

var targets = map[string]func(ctx context.Context, addresses []string, workers int) (locker, error){
	"session":        newSession,
	"unary":          newUnary,
	"etcd":           newEtcd,
	"etcd-one-lease": newEtcdOneLease,
	"redsync":        newRedsync,
}

func choices() string {
	return strings.Join(slices.Sorted(maps.Keys(targets)), ", ")
}

func main() {
	target := flag.String("target", "session", choices())
	addresses := flag.String("addr", "127.0.0.1:50051", "the addresses of the service, separated by commas")
	flag.BoolVar(&machines, "machines", false, "each connection to redfence comes from an address of its own")
	workers := flag.Int("workers", 64, "how many workers run at a time")
	resource := flag.String("resource", "own", "own: each worker has its resource; one: all share one")
	rate := flag.Float64("rate", 0, "begin this many pairs per second (default: when the last pair ends)")
	leases := flag.Int("leases", 0, "instead of workers, keep this many leases alive on sessions")
	seconds := flag.Float64("seconds", 3, "the measured time")
	warmUp := flag.Float64("warm-up", 0.5, "the time before it, in seconds")
	flag.Parse()
	load := load{
		workers: *workers,
		shared:  *resource == "one",
		rate:    *rate,
		warmUp:  time.Duration(*warmUp * float64(time.Second)),
		length:  time.Duration(*seconds * float64(time.Second)),
	}
	result, err := run(*target, strings.Split(*addresses, ","), load, *leases)
	if err == nil {
		err = json.NewEncoder(os.Stdout).Encode(result)
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "the load on %s failed: %v\n", *target, err)
		os.Exit(1)
	}
}

func run(target string, addresses []string, load load, leases int) (any, error) {
	ctx := context.Background()
	if leases > 0 {
		return keepLeases(ctx, addresses, leases, load.length)
	}
	connect, known := targets[target]
	if !known {
		return nil, fmt.Errorf("unknown target %q; choose one of %s", target, choices())
	}
	client, err := connect(ctx, addresses, load.workers)
	if err != nil {
		return nil, err
	}
	return load.run(ctx, client)
}
