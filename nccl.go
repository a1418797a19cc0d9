package allreduce

import (
	"runtime"

	"gpu.example/allreduce/device"
)

// The nccl path as Go sees it: which library to open and what it serves. The path itself is csrc/transports/nccl.cpp; that
// a library is absent, too old or no NCCL at all is the core's to find, and its reason reaches Route and the errors.

// defaultNCCL is opened where nothing names a library.
const defaultNCCL = "libnccl.so.2"

// ncclTypes are the payloads NCCL takes: every type there is.
var ncclTypes = typesOf(F32, F16, BF16, F64, I64, I32, I8, U8)

// NCCLWindows gives memory that NCCL reduces fastest: bytes on the device of each rank of this process, in the order of
// Buffers, as symmetric windows of NCCL 2.27 and later, which path nccl reads and writes directly where payload and wire have
// one type and nothing is strided or absent. It belongs to the communicator: it is there until the last graph that holds the
// communicator is gone and Close has returned. With Join all ranks call it, with the same number of bytes. ErrUnsupported where NCCL is
// not there or has no windows. It may be called beside AllReduce.
func (c *Comm) NCCLWindows(bytes int64) ([]device.Ptr, error) {
	if c == nil || c.core == nil {
		return nil, newError("NCCLWindows", ErrClosed, "the communicator was not made by New")
	}
	ptrs, e := c.core.NCCLWindows(bytes, len(c.ranks))
	runtime.KeepAlive(c)
	if e != nil {
		return nil, fromCore("NCCLWindows", e)
	}
	out := make([]device.Ptr, len(ptrs))
	for i, p := range ptrs {
		out[i] = device.Ptr(p)
	}
	return out, nil
}

// ncclLibrary is the library to open, "" for none. Emulated devices cannot use a real NCCL, so theirs must be named.
func ncclLibrary(s *settings, backend Backend) string {
	if backend == BackendEmulated && s.ncclLib == defaultNCCL {
		return ""
	}
	return s.ncclLib
}
