// Command inprocess sums two vectors, one per GPU, in the way a runtime would after each layer: one communicator, one
// AllReduce call per reduction, results on every GPU.
//
//	go run ./examples/inprocess                  # two emulated devices
//	go run -tags cuda ./examples/inprocess -cuda # two GPUs (after make)
package main

import (
	"flag"
	"fmt"
	"log"

	"gpu.example/allreduce"
	"gpu.example/allreduce/device"
)

func main() {
	cuda := flag.Bool("cuda", false, "use GPUs instead of emulated devices")
	flag.Parse()
	if err := run(*cuda); err != nil {
		log.Fatal(err)
	}
}

func run(cuda bool) error {
	const ranks = 2
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
	// A program with CUDA bindings of its own needs no package device: its pointers and streams are the same numbers.
	gpu, err := device.Open(backend)
	if err != nil {
		return err
	}

	// The decode-sized reduction goes through one kernel, the prefill-sized one through the copy engines.
	for _, count := range []int{5120, 1 << 20} {
		if err := reduce(comm, gpu, count); err != nil {
			return err
		}
	}
	for _, rank := range comm.Stats().Ranks {
		fmt.Printf("rank %d holds %d KiB pinned for %s, %d KiB for %s\n", rank.Rank,
			rank.PinnedBytes[allreduce.PathInternal]>>10, allreduce.PathInternal,
			rank.PinnedBytes[allreduce.PathCopyEngine]>>10, allreduce.PathCopyEngine)
	}
	return nil
}

// reduce sums count elements in place: rank r's are all r+1, so that every result is 1+2 = 3.
func reduce(comm *allreduce.Comm, gpu device.Driver, count int) error {
	buffers := make([]allreduce.Buffer, comm.Ranks())
	values := make([]float32, count)
	for rank, dev := range comm.Devices() {
		memory, err := gpu.Malloc(dev, int64(4*count))
		if err != nil {
			return err
		}
		defer func() { _ = gpu.Free(dev, memory) }()
		stream, err := gpu.NewStream(dev)
		if err != nil {
			return err
		}
		defer func() { _ = gpu.DestroyStream(dev, stream) }()
		for i := range values {
			values[i] = float32(rank + 1)
		}
		if err := gpu.CopyToDevice(dev, memory, device.Bytes(values)); err != nil {
			return err
		}
		buffers[rank] = allreduce.Buffer{Send: memory, Recv: memory, Count: count, Type: allreduce.F32, Stream: stream}
	}

	if err := comm.AllReduce(buffers); err != nil { // enqueues and returns
		return err
	}

	for rank, dev := range comm.Devices() {
		if err := gpu.Synchronize(dev, buffers[rank].Stream); err != nil {
			return err
		}
		if err := gpu.CopyToHost(dev, device.Bytes(values), buffers[rank].Recv); err != nil {
			return err
		}
		for i, v := range values {
			if v != 3 {
				return fmt.Errorf("rank %d, element %d: %v, not 3", rank, i, v)
			}
		}
	}
	fmt.Printf("%d elements: every rank has 3 everywhere. %s\n", count, comm.RouteFor(buffers[0]))
	return comm.Err()
}
