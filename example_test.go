package allreduce_test

import (
	"context"
	"errors"
	"fmt"
	"log"

	"gpu.example/allreduce"
	"gpu.example/allreduce/device"
)

// Two ranks, each with its part of a sum, in place. With BackendEmulated this runs anywhere; leave Backend out for GPUs.
func Example() {
	comm, err := allreduce.New(allreduce.Config{Backend: allreduce.BackendEmulated, Ranks: 2})
	if err != nil {
		log.Fatal(err)
	}
	defer comm.Close()
	d, err := device.Open(device.Emulated)
	if err != nil {
		log.Fatal(err)
	}
	parts := [][]float32{{1, 2, 3}, {10, 20, 30}}
	bufs := make([]allreduce.Buffer, 2)
	for rank, part := range parts {
		p, err := d.Malloc(rank, 12)
		if err != nil {
			log.Fatal(err)
		}
		defer func() { _ = d.Free(rank, p) }()
		if err := d.CopyToDevice(rank, p, device.Bytes(part)); err != nil {
			log.Fatal(err)
		}
		bufs[rank] = allreduce.Buffer{Send: p, Recv: p, Count: 3, Type: allreduce.F32}
	}
	if err := comm.AllReduce(bufs); err != nil {
		log.Fatal(err)
	}
	if err := comm.Wait(context.Background()); err != nil {
		log.Fatal(err)
	}
	for rank, b := range bufs {
		total := make([]float32, 3)
		if err := d.CopyToHost(rank, device.Bytes(total), b.Recv); err != nil {
			log.Fatal(err)
		}
		fmt.Println(rank, total)
	}
	// Output:
	// 0 [11 22 33]
	// 1 [11 22 33]
}

// Route says which path a size would take, and why, without reducing anything.
func ExampleComm_Route() {
	comm, err := allreduce.New(allreduce.Config{Backend: allreduce.BackendEmulated, Ranks: 2})
	if err != nil {
		log.Fatal(err)
	}
	defer comm.Close()
	for _, bytes := range []int64{20 << 10, 10 << 20} {
		r := comm.Route(bytes, allreduce.F32, allreduce.Sum)
		fmt.Println(bytes, r.Path, r.Wire)
	}
	// Output:
	// 20480 internal f32
	// 10485760 copy-engine bf16
}

// Errors unwrap to sentinels and name the rank and what is allowed.
func ExampleError() {
	comm, err := allreduce.New(allreduce.Config{Backend: allreduce.BackendEmulated, Ranks: 2})
	if err != nil {
		log.Fatal(err)
	}
	defer comm.Close()
	err = comm.AllReduce([]allreduce.Buffer{{Count: 4}, {Count: 5}})
	var e *allreduce.Error
	fmt.Println(errors.Is(err, allreduce.ErrArgument), errors.As(err, &e), e.Rank)
	fmt.Println(err)
	// Output:
	// true true 1
	// allreduce: AllReduce: rank 1 on device 1: count is 4 on rank 0 and 5 on rank 1
}
