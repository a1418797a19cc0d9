//go:build cgo && linux && (amd64 || arm64)

package core

// #include "allreduce.h"
// #include "allreduce_emulated.h"
import "C"

import "unsafe"

// Compile-time assertions that Go and C agree: index 0 of a one-element array is the only one that compiles, so each
// difference below must be 0.
var (
	one [1]struct{}

	goBuffer Buffer
	cBuffer  C.ar_buffer

	_ = one[unsafe.Sizeof(goBuffer)-unsafe.Sizeof(cBuffer)]
	_ = one[unsafe.Alignof(goBuffer)-unsafe.Alignof(cBuffer)]
	_ = one[unsafe.Offsetof(goBuffer.Send)-unsafe.Offsetof(cBuffer.send)]
	_ = one[unsafe.Offsetof(goBuffer.Recv)-unsafe.Offsetof(cBuffer.recv)]
	_ = one[unsafe.Offsetof(goBuffer.Count)-unsafe.Offsetof(cBuffer.count)]
	_ = one[unsafe.Offsetof(goBuffer.Type)-unsafe.Offsetof(cBuffer._type)]
	_ = one[unsafe.Offsetof(goBuffer.Op)-unsafe.Offsetof(cBuffer.op)]
	_ = one[unsafe.Offsetof(goBuffer.Stream)-unsafe.Offsetof(cBuffer.stream)]
	_ = one[unsafe.Offsetof(goBuffer.Absent)-unsafe.Offsetof(cBuffer.absent)]
	_ = one[unsafe.Offsetof(goBuffer.Rows)-unsafe.Offsetof(cBuffer.rows)]
	_ = one[unsafe.Offsetof(goBuffer.SendPitch)-unsafe.Offsetof(cBuffer.send_pitch)]
	_ = one[unsafe.Offsetof(goBuffer.RecvPitch)-unsafe.Offsetof(cBuffer.recv_pitch)]

	_ = one[MaxRanks-C.AR_MAX_RANKS]
	_ = one[Paths-C.AR_PATHS]
	_ = one[MaxEmulatedDevices-C.AR_EMULATED_MAX_DEVICES]
	_ = one[StatusPending-C.AR_ERR_PENDING]
	_ = one[StatusPeerLost-C.AR_ERR_PEER_LOST]
	_ = one[PathNCCL-C.AR_PATH_NCCL]
	_ = one[BenchCounters-C.AR_BENCH_COUNTERS]
	_ = one[BackendEmulated-C.AR_BACKEND_EMULATED]
	_ = one[ProbeTimeout-C.AR_PROBE_TIMEOUT]
)
