// Command processes is one process per GPU: every process is one rank, started by torchrun, mpirun or srun.
//
//	torchrun --no-python --nproc-per-node 2 go run ./examples/processes             # two emulated devices
//	mpirun -n 2 ./processes -cuda                                                   # two GPUs (built with -tags cuda)
//	for r in 0 1; do RANK=$r WORLD_SIZE=2 LOCAL_RANK=$r GGML_CUDA_AR_RENDEZVOUS=mine ./processes & done; wait
package main

import (
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"log"
	"math"
	"time"

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
	config, backend := allreduce.Config{Backend: allreduce.BackendEmulated}, device.Emulated
	if cuda {
		config.Backend, backend = allreduce.BackendCUDA, device.CUDA
	}
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second) // for the others to come
	defer cancel()
	comm, err := allreduce.Join(ctx, config, allreduce.Rank{}) // the zero Rank: what the launcher says
	if err != nil {
		return err
	}
	defer comm.Close()
	gpu, err := device.Open(backend)
	if err != nil {
		return err
	}
	for _, count := range []int{5120, 1 << 20} {
		if err := reduce(comm, gpu, count); err != nil {
			return err
		}
	}
	return nil
}

// reduce sums count elements in place: rank r's are all r+1.
func reduce(comm *allreduce.Comm, gpu device.Driver, count int) (err error) {
	rank, dev := comm.LocalRanks()[0], comm.Devices()[0]
	stream, err := gpu.NewStream(dev)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, gpu.DestroyStream(dev, stream)) }()
	memory, err := gpu.Malloc(dev, int64(4*count))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, gpu.Free(dev, memory)) }()
	values := make([]byte, 4*count)
	for i := range count {
		binary.LittleEndian.PutUint32(values[4*i:], math.Float32bits(float32(rank+1)))
	}
	if err := gpu.CopyToDevice(dev, memory, values); err != nil {
		return err
	}
	buffer := allreduce.Buffer{Send: memory, Recv: memory, Count: count, Type: allreduce.F32, Stream: stream}
	if err := comm.AllReduce([]allreduce.Buffer{buffer}); err != nil { // one buffer: this rank's
		return err
	}
	if err := gpu.Synchronize(dev, stream); err != nil {
		return err
	}
	if err := comm.Err(); err != nil { // a rank that is gone, or does something else
		return err
	}
	if err := gpu.CopyToHost(dev, values, memory); err != nil {
		return err
	}
	want := float32(comm.Ranks() * (comm.Ranks() + 1) / 2)
	for i := range count {
		if got := math.Float32frombits(binary.LittleEndian.Uint32(values[4*i:])); got != want {
			return fmt.Errorf("element %d is %v, not %v", i, got, want)
		}
	}
	fmt.Printf("rank %d of %d: %d elements are %v everywhere. %s\n", rank, comm.Ranks(), count, want, comm.RouteFor(buffer))
	return nil
}
