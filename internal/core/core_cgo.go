//go:build cgo && linux && (amd64 || arm64)

package core

/*
#cgo noescape ar_allreduce
#cgo nocallback ar_allreduce
#include <stdlib.h>
#include "allreduce.h"
*/
import "C"

import (
	"fmt"
	"unsafe"
)

// abiError is set where the linked library is not the one this package's header describes: only an archive that is
// older or newer than the checkout can cause that.
var abiError = checkABI(int(C.ar_abi_version()), C.AR_ABI_VERSION)

func checkABI(library, header int) *Error {
	if library == header {
		return nil
	}
	return newError(StatusBackend, fmt.Sprintf("the linked liballreduce has ABI version %d, its header %d: run make again", library, header))
}

// Available says why this build has no C core; nil where it has one.
func Available() *Error { return abiError }

// Version is ar_version: the version of the C core.
func Version() string { return C.GoString(C.ar_version()) }

// SourceHash is ar_source_hash: the hash of the sources the core was built from, 0 where the build gave none.
func SourceHash() uint64 { return uint64(C.ar_source_hash()) }

// HasBackend says from ar_backends whether this build holds a backend.
func HasBackend(backend int32) bool {
	return abiError == nil && backend >= 0 && backend < 31 && C.ar_backends()&(1<<backend) != 0
}

// RuntimeVersion is ar_runtime_version: 13000 for CUDA 13.0, 0 for emulated or absent.
func RuntimeVersion(backend int32) int { return int(C.ar_runtime_version(C.int32_t(backend))) }

// convert turns a failed call's status and ar_error into an *Error.
func convert(status C.int32_t, e *C.ar_error) *Error {
	if status == C.AR_OK {
		return nil
	}
	out := &Error{
		Status:  Status(status),
		Code:    int(e.platform_code),
		Rank:    int(e.rank),
		Device:  int(e.device),
		Peer:    int(e.peer),
		Message: C.GoString(&e.message[0]),
	}
	if out.Status == StatusTimeout || out.Status == StatusMismatch {
		out.Call = uint64(e.call)
		out.Seen, out.Awaited = uint32(e.seen), uint32(e.awaited)
		out.Phase = C.GoString(&e.phase[0])
	}
	return out
}

// blank is the ar_error handed to C: no rank, device or peer unless C says so.
func blank() C.ar_error { return C.ar_error{rank: -1, device: -1, peer: -1} }

// Comm is a communicator's handle. Its methods may be called until Free.
type Comm struct {
	p *C.ar_comm
}

// CreateComm is ar_comm_create. The handle is the caller's to Free.
func CreateComm(o Options) (*Comm, *Error) {
	if abiError != nil {
		return nil, abiError
	}
	world := len(o.Devices)
	if world < 1 || world > MaxRanks {
		return nil, newError(StatusArgument, fmt.Sprintf("%d ranks; allowed: 1 to %d", world, MaxRanks))
	}
	// The two arrays live in C memory for the call: a Go struct that points to Go memory must not be handed to C.
	devices := (*[MaxRanks]C.int32_t)(C.calloc(MaxRanks, C.sizeof_int32_t))
	defer C.free(unsafe.Pointer(devices))
	links := (*[MaxRanks]C.double)(C.calloc(MaxRanks, C.sizeof_double))
	defer C.free(unsafe.Pointer(links))
	for i, d := range o.Devices {
		devices[i] = C.int32_t(d)
	}
	for i, l := range o.LinkGBs {
		if i < world {
			links[i] = C.double(l)
		}
	}
	opts := C.ar_options{
		size:            C.sizeof_ar_options,
		backend:         C.int32_t(o.Backend),
		world:           C.int32_t(world),
		devices:         &devices[0],
		link_gbs:        &links[0],
		ring_bytes:      C.int64_t(o.RingBytes),
		chunk_bytes:     C.int64_t(o.ChunkBytes),
		blocks:          C.int32_t(o.Blocks),
		spin_timeout_ms: C.int32_t(o.SpinTimeoutMs),
		first_epoch:     C.uint32_t(o.FirstEpoch),
	}
	if o.NCCLLib != "" {
		opts.nccl_lib = C.CString(o.NCCLLib)
		defer C.free(unsafe.Pointer(opts.nccl_lib))
	}
	if o.NCCLNoPeer {
		opts.nccl_p2p_disable = 1
	}
	if o.Peer {
		opts.peer = 1
	}
	if o.NoOp {
		opts.noop = 1
	}
	if len(o.Ranks) > 0 {
		if len(o.Ranks) > world {
			return nil, newError(StatusArgument, fmt.Sprintf("%d ranks of %d are here", len(o.Ranks), world))
		}
		ranks := (*[MaxRanks]C.int32_t)(C.calloc(MaxRanks, C.sizeof_int32_t))
		defer C.free(unsafe.Pointer(ranks))
		for i, r := range o.Ranks {
			ranks[i] = C.int32_t(r)
		}
		opts.locals, opts.ranks, opts.shared_fd = C.int32_t(len(o.Ranks)), &ranks[0], C.int32_t(o.SharedFD)
		if o.NCCLID != nil {
			opts.nccl_id = (*C.uint8_t)(C.CBytes(o.NCCLID))
			defer C.free(unsafe.Pointer(opts.nccl_id))
		}
	}
	c := new(Comm)
	e := blank()
	var p *C.ar_comm
	if err := convert(C.ar_comm_create(&opts, &p, &e), &e); err != nil {
		return nil, err
	}
	c.p = p
	return c, nil
}

// SharedBytes is ar_shared_bytes: the size of the file that the processes of a communicator share.
func SharedBytes(world int, ringBytes int64) int64 {
	opts := C.ar_options{world: C.int32_t(world), ring_bytes: C.int64_t(ringBytes)}
	return int64(C.ar_shared_bytes(&opts))
}

// NCCLID is ar_nccl_id: what lets processes that all have it meet in NCCL.
func NCCLID(backend int32, library string, noPeer bool) ([]byte, *Error) {
	name := C.CString(library)
	defer C.free(unsafe.Pointer(name))
	var disable C.int32_t
	if noPeer {
		disable = 1
	}
	var id [C.AR_NCCL_ID_BYTES]C.uint8_t
	e := blank()
	if err := convert(C.ar_nccl_id(C.int32_t(backend), name, disable, &id[0], &e), &e); err != nil {
		return nil, err
	}
	return C.GoBytes(unsafe.Pointer(&id[0]), C.AR_NCCL_ID_BYTES), nil
}

// ExportPeer is ar_comm_export_peer: what a rank of this process gives its peers in others.
func (c *Comm) ExportPeer(rank int) ([]byte, *Error) {
	var handle [C.AR_PEER_HANDLE_BYTES]C.uint8_t
	e := blank()
	if err := convert(C.ar_comm_export_peer(c.p, C.int32_t(rank), &handle[0], &e), &e); err != nil {
		return nil, err
	}
	return C.GoBytes(unsafe.Pointer(&handle[0]), C.AR_PEER_HANDLE_BYTES), nil
}

// ImportPeers is ar_comm_import_peers; handles are of all ranks.
func (c *Comm) ImportPeers(handles [][]byte) *Error {
	all := C.calloc(C.size_t(len(handles)), C.AR_PEER_HANDLE_BYTES)
	defer C.free(all)
	to := unsafe.Slice((*byte)(all), len(handles)*C.AR_PEER_HANDLE_BYTES)
	for r, h := range handles {
		copy(to[r*C.AR_PEER_HANDLE_BYTES:(r+1)*C.AR_PEER_HANDLE_BYTES], h)
	}
	e := blank()
	return convert(C.ar_comm_import_peers(c.p, (*C.uint8_t)(all), &e), &e)
}

// CheckPeers is ar_comm_check_peers: stores a pattern into the rings of the others, or looks for theirs in its own.
func (c *Comm) CheckPeers(look bool) *Error {
	e, flag := blank(), C.int32_t(0)
	if look {
		flag = 1
	}
	return convert(C.ar_comm_check_peers(c.p, flag, &e), &e)
}

// NCCLWindows is ar_comm_nccl_windows: a pointer for each rank of this process, of which there are so many.
func (c *Comm) NCCLWindows(bytes int64, locals int) ([]uint64, *Error) {
	ptrs := make([]C.ar_ptr, locals)
	e := blank()
	if err := convert(C.ar_comm_nccl_windows(c.p, C.int64_t(bytes), &ptrs[0], &e), &e); err != nil {
		return nil, err
	}
	out := make([]uint64, locals)
	for i, p := range ptrs {
		out[i] = uint64(p)
	}
	return out, nil
}

// Lose is ar_comm_lose: ends the communicator on all its ranks, since one is gone.
func (c *Comm) Lose(rank int, text string) {
	t := C.CString(text)
	defer C.free(unsafe.Pointer(t))
	C.ar_comm_lose(c.p, C.int32_t(rank), t, nil)
}

// HasPath is ar_comm_has_path: whether a path exists for this communicator, and if not, why.
func (c *Comm) HasPath(path int32) (bool, string) {
	const size = 512
	reason := (*C.char)(C.calloc(1, size))
	defer C.free(unsafe.Pointer(reason))
	has := C.ar_comm_has_path(c.p, C.int32_t(path), reason, size) != 0
	return has, C.GoString(reason)
}

// AllReduce is ar_allreduce: one call into C, and no Go allocation unless it fails. n buffers start at bufs.
func (c *Comm) AllReduce(bufs *Buffer, n int, path, wire int32) *Error {
	e := C.ar_error{}
	status := C.ar_allreduce(c.p, (*C.ar_buffer)(unsafe.Pointer(bufs)), C.int32_t(n), C.int32_t(path), C.int32_t(wire), &e)
	if status == C.AR_OK {
		return nil
	}
	failure := e // convert lets its argument escape: only this copy, made on failure, is on the heap
	return convert(status, &failure)
}

// Prepare is ar_comm_prepare for one path.
func (c *Comm) Prepare(maxBytes int64, path int32) *Error {
	e := blank()
	return convert(C.ar_comm_prepare(c.p, C.int64_t(maxBytes), C.int32_t(path), &e), &e)
}

// Wait is ar_comm_wait: StatusPending where the calls made so far have not ended after timeoutUs.
func (c *Comm) Wait(timeoutUs int64) *Error {
	e := blank()
	return convert(C.ar_comm_wait(c.p, C.int64_t(timeoutUs), &e), &e)
}

// Err is ar_comm_error: the latched failure. Never waits.
func (c *Comm) Err() *Error {
	e := blank()
	return convert(C.ar_comm_error(c.p, &e), &e)
}

// Stats is ar_comm_stats.
func (c *Comm) Stats() Stats {
	var s C.ar_stats
	var out Stats
	if C.ar_comm_stats(c.p, &s) != C.AR_OK {
		return out
	}
	for p := range Paths {
		out.Calls[p], out.Bytes[p] = uint64(s.calls[p]), uint64(s.bytes[p])
	}
	out.Allocations = uint64(s.allocations)
	out.ChunkBytes = int(s.chunk_bytes)
	out.NCCLVersion = int(s.nccl_version)
	out.Ranks = make([]RankStats, min(int(s.ranks), MaxRanks))
	for i := range out.Ranks {
		r := &s.rank[i]
		out.Ranks[i].Rank, out.Ranks[i].Device = int(r.rank), int(r.device)
		for p := range Paths {
			out.Ranks[i].DeviceBytes[p] = int64(r.device_bytes[p])
			out.Ranks[i].PinnedBytes[p] = int64(r.pinned_bytes[p])
		}
	}
	return out
}

// Close is ar_comm_close: ends the communicator; the handle stays valid for Err and Close.
func (c *Comm) Close() *Error {
	e := blank()
	return convert(C.ar_comm_close(c.p, &e), &e)
}

// Free is ar_comm_free: releases the handle, which must not be used afterwards.
func (c *Comm) Free() {
	C.ar_comm_free(c.p)
	c.p = nil
}
