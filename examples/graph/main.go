// Command graph captures four reductions over two devices in one graph and replays it: what a runtime does that captures
// a token's forward pass. A graph over several devices is launched into one stream, so the other ranks' streams join
// that stream's capture by an event before, and come back to it by an event after.
//
//	go run ./examples/graph                  # two emulated devices
//	go run -tags cuda ./examples/graph -cuda # two GPUs (after make)
package main

import (
	"flag"
	"fmt"
	"log"
	"math"

	"gpu.example/allreduce"
	"gpu.example/allreduce/device"
)

const (
	ranks   = 2
	layers  = 4
	count   = 5120
	replays = 3
)

func main() {
	cuda := flag.Bool("cuda", false, "use GPUs instead of emulated devices")
	flag.Parse()
	if err := run(*cuda); err != nil {
		log.Fatal(err)
	}
}

func run(cuda bool) error {
	config := allreduce.Config{Backend: allreduce.BackendEmulated, Ranks: ranks}
	backend := device.Emulated
	if cuda {
		config.Backend, backend = allreduce.BackendCUDA, device.CUDA
	}
	comm, err := allreduce.New(config)
	if err != nil {
		return err
	}
	defer comm.Close()
	gpu, err := device.Open(backend)
	if err != nil {
		return err
	}
	// Everything the captured calls need exists before the capture: no allocation and no kernel load inside it.
	if err := comm.Prepare(4*count, allreduce.F32); err != nil {
		return err
	}

	devices := comm.Devices()
	buffers := make([]allreduce.Buffer, ranks)
	joined := make([]device.Event, ranks) // of rank 0: the fork; of the others: the way back
	for rank, dev := range devices {
		memory, err := gpu.Malloc(dev, 4*count)
		if err != nil {
			return err
		}
		defer func() { _ = gpu.Free(dev, memory) }()
		stream, err := gpu.NewStream(dev)
		if err != nil {
			return err
		}
		defer func() { _ = gpu.DestroyStream(dev, stream) }()
		if joined[rank], err = gpu.NewEvent(dev); err != nil {
			return err
		}
		defer func() { _ = gpu.DestroyEvent(dev, joined[rank]) }()
		buffers[rank] = allreduce.Buffer{Send: memory, Recv: memory, Count: count, Type: allreduce.F32, Stream: stream}
	}

	graph, err := capture(comm, gpu, buffers, joined)
	if err != nil {
		return err
	}
	defer func() { _ = gpu.DestroyGraph(devices[0], graph) }()
	fmt.Printf("captured %d reductions of %d elements. %s\n", layers, count, comm.RouteFor(buffers[0]))

	// All ones in, and each in-place reduction doubles: 2^layers after one replay.
	values := make([]float32, count)
	for i := range values {
		values[i] = 1
	}
	for rank, dev := range devices {
		if err := gpu.CopyToDevice(dev, buffers[rank].Send, device.Bytes(values)); err != nil {
			return err
		}
	}
	for range replays {
		if err := gpu.Launch(devices[0], graph, buffers[0].Stream); err != nil {
			return err
		}
	}
	if err := gpu.Synchronize(devices[0], buffers[0].Stream); err != nil {
		return err
	}
	want := float32(math.Pow(ranks, layers*replays))
	for rank, dev := range devices {
		if err := gpu.CopyToHost(dev, device.Bytes(values), buffers[rank].Recv); err != nil {
			return err
		}
		for i, v := range values {
			if v != want {
				return fmt.Errorf("rank %d, element %d: %v, not %v", rank, i, v, want)
			}
		}
	}
	fmt.Printf("%d replays: every rank has %v everywhere\n", replays, want)
	return comm.Err()
}

func capture(comm *allreduce.Comm, gpu device.Driver, buffers []allreduce.Buffer, joined []device.Event) (device.Graph, error) {
	devices := comm.Devices()
	first := buffers[0].Stream
	if err := gpu.BeginCapture(devices[0], first); err != nil {
		return 0, err
	}
	enqueue := func() error {
		if err := gpu.Record(devices[0], joined[0], first); err != nil {
			return err
		}
		for rank := 1; rank < ranks; rank++ {
			if err := gpu.WaitEvent(devices[rank], buffers[rank].Stream, joined[0]); err != nil {
				return err
			}
		}
		for range layers { // a real program enqueues the layer's kernels between these
			if err := comm.AllReduce(buffers); err != nil {
				return err
			}
		}
		for rank := 1; rank < ranks; rank++ {
			if err := gpu.Record(devices[rank], joined[rank], buffers[rank].Stream); err != nil {
				return err
			}
			if err := gpu.WaitEvent(devices[0], first, joined[rank]); err != nil {
				return err
			}
		}
		return nil
	}
	err := enqueue()
	graph, ending := gpu.EndCapture(devices[0], first) // after a failure too, or the stream stays in capture
	if err != nil {
		return 0, err
	}
	return graph, ending
}
