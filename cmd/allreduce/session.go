package main

import (
	"context"
	"errors"
	"fmt"

	"gpu.example/allreduce"
	"gpu.example/allreduce/device"
)

// session is one communicator with its devices and a stream per rank.
type session struct {
	driver  device.Driver
	create  creator
	comm    *allreduce.Comm
	ranks   []int // of this process
	devices []int // of each of them
	streams []device.Stream
	cleanup []func()
}

// pickBackend opens the devices that --backend means for so many ranks of this process. note says why auto did not take
// GPUs.
func pickBackend(backend string, ranks int, devices []int) (driver device.Driver, note string, err error) {
	if backend == "emulated" {
		driver, err = device.Open(device.Emulated)
		return driver, "", err
	}
	driver, err = device.Open(device.CUDA)
	if backend == "cuda" {
		return driver, "", err
	}
	switch {
	case errors.Is(err, allreduce.ErrBackend):
		note = "this build has no CUDA backend"
	case errors.Is(err, allreduce.ErrNoDevice):
		note = "no GPU here"
	case err != nil:
		return driver, "", fmt.Errorf("%w (--backend emulated leaves the GPUs alone)", err)
	default:
		count, err := driver.Count()
		if err != nil || devices != nil || count >= ranks {
			return driver, "", err
		}
		note = fmt.Sprintf("only %s here for %s", counted(count, "GPU"), counted(ranks, "rank"))
	}
	driver, err = device.Open(device.Emulated)
	return driver, note + ": emulated devices, times are simulated", err
}

// creator makes communicators.
type creator func(allreduce.Config) (*allreduce.Comm, error)

// createFor gives New, or Join where this process is one rank among several. Config.Devices has every rank's.
func createFor(ctx context.Context, rank *allreduce.Rank) creator {
	if rank == nil {
		return allreduce.New
	}
	return func(c allreduce.Config) (*allreduce.Comm, error) {
		if c.Devices != nil {
			c.Ranks, c.Devices = 0, c.Devices[rank.Rank:][:1]
		}
		return allreduce.Join(ctx, c, *rank)
	}
}

// openSession makes the communicator first: it decides what the emulated machine looks like.
func openSession(driver device.Driver, create creator, config allreduce.Config) (s *session, err error) {
	s = &session{driver: driver, create: create}
	defer func() {
		if err != nil {
			s.close()
		}
	}()
	if s.comm, err = s.newComm(config); err != nil {
		return s, err
	}
	return s, s.equip()
}

// equip makes what goes with a communicator.
func (s *session) equip() error {
	s.ranks, s.devices = s.comm.LocalRanks(), s.comm.Devices()
	for _, dev := range s.devices {
		stream, err := s.driver.NewStream(dev)
		if err != nil {
			return err
		}
		s.streams = append(s.streams, stream)
		s.later(func() { _ = s.driver.DestroyStream(dev, stream) })
	}
	return nil
}

// newComm makes another communicator on the session's backend, closed by close.
func (s *session) newComm(config allreduce.Config) (*allreduce.Comm, error) {
	config.Backend = s.backend()
	comm, err := s.create(config)
	if err == nil {
		s.later(func() { _ = comm.Close() })
	}
	return comm, err
}

func (s *session) backend() allreduce.Backend {
	if s.simulated() {
		return allreduce.BackendEmulated
	}
	return allreduce.BackendCUDA
}

func (s *session) simulated() bool { return s.driver.Backend() == device.Emulated }

// later keeps what close does, in reverse order.
func (s *session) later(f func()) { s.cleanup = append(s.cleanup, f) }

func (s *session) close() { s.closeFrom(0) }

// closeFrom undoes what came after the first n entries.
func (s *session) closeFrom(n int) {
	for i := len(s.cleanup) - 1; i >= n; i-- {
		s.cleanup[i]()
	}
	s.cleanup = s.cleanup[:n]
}

// synchronize waits for every rank's stream; a failed reduction shows in the communicator.
func (s *session) synchronize() error {
	for rank, stream := range s.streams {
		if err := s.driver.Synchronize(s.devices[rank], stream); err != nil {
			if failure := s.comm.Err(); failure != nil {
				return failure
			}
			return err
		}
	}
	return s.comm.Err()
}

// fork makes the other ranks' streams wait for rank 0's; join is the way back. Inside a capture on rank 0's stream this
// takes the other streams into it.
func (s *session) fork(event device.Event) error {
	if err := s.driver.Record(s.devices[0], event, s.streams[0]); err != nil {
		return err
	}
	for rank := 1; rank < len(s.streams); rank++ {
		if err := s.driver.WaitEvent(s.devices[rank], s.streams[rank], event); err != nil {
			return err
		}
	}
	return nil
}

func (s *session) join(events []device.Event) error {
	for rank := 1; rank < len(s.streams); rank++ {
		if err := s.driver.Record(s.devices[rank], events[rank], s.streams[rank]); err != nil {
			return err
		}
		if err := s.driver.WaitEvent(s.devices[0], s.streams[0], events[rank]); err != nil {
			return err
		}
	}
	return nil
}

// newEvents makes n events on a device, destroyed by close.
func (s *session) newEvents(dev, n int) ([]device.Event, error) {
	events := make([]device.Event, n)
	for i := range events {
		event, err := s.driver.NewEvent(dev)
		if err != nil {
			return nil, err
		}
		events[i] = event
		s.later(func() { _ = s.driver.DestroyEvent(dev, event) })
	}
	return events, nil
}

// malloc allocates on a device; close frees.
func (s *session) malloc(dev int, bytes int64) (device.Ptr, error) {
	p, err := s.driver.Malloc(dev, bytes)
	if err == nil {
		s.later(func() { _ = s.driver.Free(dev, p) })
	}
	return p, err
}

// counted is "1 rank", "2 ranks".
func counted(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}
