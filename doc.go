// Package allreduce sums tensors over the GPUs of one machine: every rank gives a buffer, every rank gets the total,
// the same bits everywhere, and no call ever hangs. It takes the fastest path this machine can really use and says
// which one, and why:
//
//   - internal: one small kernel per GPU through pinned host memory, for small reductions;
//   - copy-engine: the GPUs' copy engines through a pinned ring, with no SM in the transfer, for large ones;
//   - peer: direct stores into the peers' memory, where peer access is proven;
//   - nccl: libnccl, opened at run time, for what the others cannot take.
//
// A machine without a GPU runs the same code on emulated devices with a simulated clock (BackendEmulated).
//
// Two GPUs, tensors a0 and a1 of n floats on devices 0 and 1, the stream of each:
//
//	comm, err := allreduce.New(allreduce.Config{})
//	if err != nil {
//		return err
//	}
//	defer comm.Close()
//	err = comm.AllReduce([]allreduce.Buffer{
//		{Send: a0, Recv: a0, Count: n, Type: allreduce.F32, Stream: s0},
//		{Send: a1, Recv: a1, Count: n, Type: allreduce.F32, Stream: s1},
//	}) // enqueued; work enqueued on s0 and s1 from here on sees the total
//	err = comm.Wait(ctx)
//
// Pointers and streams are the integers a CUDA binding has; package device makes them for programs without one. Config
// and the environment variables that Variables lists choose paths, borders and wires; docs/multi-gpu.md has the table.
//
// AllReduce enqueues and returns; it can be captured into a CUDA graph. A communicator may be used from any goroutine:
// its calls form one sequence. Errors are of type *Error and unwrap to the sentinels Err...; nothing here panics,
// exits, or writes to standard error unless GGML_CUDA_AR_TRACE or GGML_CUDA_AR_NOOP ask for it.
//
// The package compiles everywhere; it works on Linux with cgo (amd64, arm64). Elsewhere New returns ErrNoCgo or
// ErrPlatform.
package allreduce
