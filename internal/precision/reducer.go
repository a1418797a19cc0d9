package precision

import (
	"bytes"
	"context"
	"errors"
	"fmt"

	"gpu.example/allreduce"
	"gpu.example/allreduce/device"
	"gpu.example/allreduce/internal/reference"
)

// poison fills the results before a reduction: a NaN that none stores.
const poison = 0xFF

// reducer sums F32 payloads of one size through a communicator, on one path and wire.
type reducer struct {
	driver     device.Driver
	comm       *allreduce.Comm
	path       allreduce.Path
	wire       allreduce.Type
	devices    []int // of each rank
	streams    []device.Stream
	send, recv []device.Ptr
	count      int
	cleanup    []func()
}

var pathOf = map[allreduce.Algorithm]allreduce.Path{
	allreduce.AlgorithmInternal: allreduce.PathInternal, allreduce.AlgorithmCopyEngine: allreduce.PathCopyEngine,
	allreduce.AlgorithmPeer: allreduce.PathPeer, allreduce.AlgorithmNCCL: allreduce.PathNCCL,
}

// newReducer makes one. ErrUnsupported (ErrNCCL) where the path does not exist here or does not take this wire.
func newReducer(driver device.Driver, algorithm allreduce.Algorithm, wire allreduce.Type, ranks, count int) (r *reducer, err error) {
	config := allreduce.Config{Backend: allreduce.Backend(driver.Backend()), Ranks: ranks, Algorithm: algorithm,
		CopyEngine: allreduce.On, NoOp: allreduce.Off, Wire: allreduce.WireF32}
	if wire == allreduce.BF16 {
		config.Wire = allreduce.WireBF16
	}
	r = &reducer{driver: driver, path: pathOf[algorithm], wire: wire, count: count}
	r.comm, err = allreduce.New(config)
	if errors.Is(err, allreduce.ErrNoDevice) { // fewer devices than ranks: the ranks share them
		n, counting := driver.Count()
		if counting != nil || n == 0 || n >= ranks {
			return nil, err
		}
		for rank := range ranks {
			config.Devices = append(config.Devices, rank%n)
		}
		r.comm, err = allreduce.New(config)
	}
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			r.close()
		}
	}()
	r.later(func() { _ = r.comm.Close() })
	if err := r.check(); err != nil {
		return nil, err
	}
	r.devices = r.comm.Devices()
	size := int64(count) * int64(allreduce.F32.Size())
	for _, dev := range r.devices {
		stream, err := driver.NewStream(dev)
		if err != nil {
			return nil, err
		}
		r.streams = append(r.streams, stream)
		r.later(func() { _ = driver.DestroyStream(dev, stream) })
		for _, to := range []*[]device.Ptr{&r.send, &r.recv} {
			p, err := driver.Malloc(dev, size)
			if err != nil {
				return nil, err
			}
			*to = append(*to, p)
			r.later(func() { _ = driver.Free(dev, p) })
		}
	}
	r.later(func() { // before anything is freed
		for rank, stream := range r.streams {
			_ = driver.Synchronize(r.devices[rank], stream)
		}
	})
	return r, nil
}

func (r *reducer) later(f func()) { r.cleanup = append(r.cleanup, f) }

func (r *reducer) close() {
	for i := len(r.cleanup) - 1; i >= 0; i-- {
		r.cleanup[i]()
	}
	r.cleanup = nil
}

// check fails where the reductions would take another path or wire than this reducer is for.
func (r *reducer) check() error {
	route := r.comm.Route(int64(r.count)*int64(allreduce.F32.Size()), allreduce.F32, allreduce.Sum)
	if route.Path != r.path || route.Wire != r.wire {
		return fmt.Errorf("%w: path %s with wire %s: the route is %s with wire %s (%s)", allreduce.ErrUnsupported, r.path, r.wire,
			route.Path, route.Wire, route.Reason)
	}
	return nil
}

// sum reduces once, out of place.
func (r *reducer) sum(ctx context.Context, inputs [][]float32, want []float32) (s sum, err error) {
	if ctx.Err() != nil {
		return s, errors.New("interrupted")
	}
	defer func() {
		if err != nil { // a call that failed may have enqueued a part of itself, which reads the inputs
			for rank, dev := range r.devices {
				_ = r.driver.Synchronize(dev, r.streams[rank])
			}
		}
	}()
	buffers := make([]allreduce.Buffer, len(r.devices))
	for rank, dev := range r.devices {
		if err := r.driver.CopyToDevice(dev, r.send[rank], device.Bytes(inputs[rank])); err != nil {
			return s, err
		}
		size := int64(r.count) * int64(allreduce.F32.Size())
		if err := r.driver.FillAsync(dev, r.recv[rank], poison, size, r.streams[rank]); err != nil {
			return s, err
		}
		buffers[rank] = allreduce.Buffer{Send: r.send[rank], Recv: r.recv[rank], Count: r.count, Type: allreduce.F32, Op: allreduce.Sum,
			Stream: r.streams[rank]}
	}
	if err := r.comm.AllReduce(buffers); err != nil {
		return s, err
	}
	if err := r.comm.Wait(ctx); err != nil {
		return s, err
	}
	if err := r.check(); err != nil { // its memory could not be had, and another path took over
		return s, err
	}
	s.ranksEqual = true
	s.values = make([]float32, r.count)
	other := make([]float32, r.count)
	for rank, dev := range r.devices {
		if err := r.driver.Synchronize(dev, r.streams[rank]); err != nil {
			return s, err
		}
		got := s.values
		if rank > 0 {
			got = other
		}
		if err := r.driver.CopyToHost(dev, device.Bytes(got), r.recv[rank]); err != nil {
			return s, err
		}
		s.ranksEqual = s.ranksEqual && (rank == 0 || bytes.Equal(device.Bytes(got), device.Bytes(s.values)))
		if !bytes.Equal(device.Bytes(got), device.Bytes(want)) {
			count, _ := reference.Different(device.Bytes(got), device.Bytes(want), reference.F32)
			s.wrong += int64(count)
		}
	}
	return s, nil
}
