package main

import (
	"context"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	redfencev1 "redfence-bench/gen/redfence/v1"
)

// A message has at most 64 KiB, and a command here fewer than 200 bytes.
const commandsPerMessageMax = 200

// session carries the commands of many workers on one stream for each address. Commands that are
// ready at the same time leave in one message.
type session struct{ streams []*stream }

type stream struct {
	commands chan *redfencev1.SessionCommand
	lastID   atomic.Uint64
	mutex    sync.Mutex
	waiting  map[uint64]chan *redfencev1.SessionResult
	failure  error // why the stream ended
}

func newSession(ctx context.Context, addresses []string, workers int) (locker, error) {
	stubs, err := connectAll(addresses)
	if err != nil {
		return nil, err
	}
	var all session
	for _, stub := range stubs {
		calls, err := stub.Session(ctx)
		if err != nil {
			return nil, err
		}
		opened := &stream{
			commands: make(chan *redfencev1.SessionCommand, workers),
			waiting:  make(map[uint64]chan *redfencev1.SessionResult),
		}
		go opened.write(calls)
		go opened.read(calls)
		all.streams = append(all.streams, opened)
	}
	return &all, nil
}

// write sends what the workers have queued, as few messages as possible.
func (s *stream) write(calls redfencev1.LockService_SessionClient) {
	for command := range s.commands {
		batch := []*redfencev1.SessionCommand{command}
		// Workers that the last message woke are about to queue their next commands.
		runtime.Gosched()
	queued:
		for len(batch) < commandsPerMessageMax {
			select {
			case command := <-s.commands:
				batch = append(batch, command)
			default:
				break queued
			}
		}
		// After an error the reader learns why the stream ended.
		if calls.Send(&redfencev1.SessionRequest{Commands: batch}) != nil {
			return
		}
	}
}

func (s *stream) read(calls redfencev1.LockService_SessionClient) {
	for {
		response, err := calls.Recv()
		s.mutex.Lock()
		if err != nil {
			s.failure = err
			for _, waiting := range s.waiting {
				close(waiting)
			}
			s.mutex.Unlock()
			return
		}
		for _, result := range response.Results {
			s.waiting[result.Id] <- result
			delete(s.waiting, result.Id)
		}
		s.mutex.Unlock()
	}
}

// call sends a command and waits for its result.
func (s *stream) call(command *redfencev1.SessionCommand) (*redfencev1.SessionResult, error) {
	answered := make(chan *redfencev1.SessionResult, 1)
	command.Id = s.lastID.Add(1)
	s.mutex.Lock()
	if s.failure != nil {
		s.mutex.Unlock()
		return nil, s.failure
	}
	s.waiting[command.Id] = answered
	s.mutex.Unlock()
	s.commands <- command
	result, open := <-answered
	if !open {
		return nil, s.failure
	}
	if failed := result.GetError(); failed != nil {
		return nil, fmt.Errorf("%v: %s", failed.Reason, failed.Message)
	}
	return result, nil
}

func (s *session) acquire(_ context.Context, worker int, resource string) (held, error) {
	stream := s.streams[worker%len(s.streams)]
	result, err := stream.call(&redfencev1.SessionCommand{
		Command: &redfencev1.SessionCommand_Acquire{Acquire: acquireRequest(resource, newLeaseID())},
	})
	if err != nil {
		return held{}, err
	}
	lock, err := grantOf(result.GetAcquire(), resource)
	lock.mutex = stream
	return lock, err
}

func (s *session) release(_ context.Context, lock held) error {
	result, err := lock.mutex.(*stream).call(&redfencev1.SessionCommand{
		Command: &redfencev1.SessionCommand_Release{
			Release: &redfencev1.ReleaseRequest{Resource: lock.resource, LeaseId: lock.id},
		},
	})
	if err != nil {
		return err
	}
	return checkReleased(result.GetRelease())
}

// renew returns the state of the lease, and how long it is valid from the instant of the call.
func (s *session) renew(lock held) (redfencev1.LeaseState, time.Duration, error) {
	result, err := lock.mutex.(*stream).call(&redfencev1.SessionCommand{
		Command: &redfencev1.SessionCommand_Renew{
			Renew: &redfencev1.KeepAliveRequest{Resource: lock.resource, LeaseId: lock.id},
		},
	})
	if err != nil {
		return 0, 0, err
	}
	return result.GetRenew().GetState(), result.GetRenew().GetValidity().AsDuration(), nil
}
