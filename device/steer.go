package device

import (
	"fmt"

	"gpu.example/allreduce/internal/core"
)

// NowMicros is the emulated machine's simulated clock.
func NowMicros() float64 { return core.EmulatedNowUs() }

// Call is a kind of runtime call that a fault can hit.
type Call int32

// The kinds.
const (
	CallMalloc       Call = 0 // device memory
	CallMallocHost   Call = 1 // pinned memory
	CallCopy         Call = 2
	CallLaunch       Call = 3
	CallRecord       Call = 4
	CallWait         Call = 5 // a stream's wait for an event
	CallStreamCreate Call = 6
	CallEventCreate  Call = 7
	CallGraph        Call = 8
	CallIPCOpen      Call = 9 // of memory that another process has exported
)

// Fail lets the nth next call of a kind fail once (1: the next), on the emulated machine; 0 takes that back.
func Fail(call Call, nth int64) { core.EmulatedFail(int32(call), nth) }

// Order is one ordering primitive of the transports (csrc/order.h): a wait, fence, flag or slot turn.
type Order struct {
	ID    int    // from 1
	Name  string // "ce_chunk_arrived"
	Text  string // what it guarantees, in one sentence
	Count int64  // how often it was passed since the machine was configured
}

// Orders lists the ordering primitives.
func Orders() []Order {
	all := core.EmulatedOrders()
	out := make([]Order, len(all))
	for i, o := range all {
		out[i] = Order{ID: int(o.ID), Name: o.Name, Text: o.Text, Count: o.Count}
	}
	return out
}

// Mutate takes one ordering primitive out, so that a test can show that its absence is noticed; 0 puts all back.
func Mutate(id int) { core.EmulatedMutate(int32(id)) }

// TraceKind is what a recorded operation was.
type TraceKind int32

// The kinds of operations.
const (
	TraceKernel         TraceKind = 0
	TraceHostToDevice   TraceKind = 1
	TraceDeviceToHost   TraceKind = 2
	TraceDeviceToDevice TraceKind = 3
	TraceOther          TraceKind = 4
)

var traceKindNames = []string{"kernel", "host-to-device", "device-to-host", "device-to-device", "other"}

// String gives "kernel", "host-to-device", "device-to-host", "device-to-device" or "other".
func (k TraceKind) String() string { return nameOf(traceKindNames, int32(k)) }

// TraceRecord is one finished operation of the emulated machine, in simulated microseconds.
type TraceRecord struct {
	StartMicros, EndMicros float64
	Device                 int
	Kind                   TraceKind
	Stream                 Stream
	Bytes                  int64
	Name                   string // the kernel's, or "copy"
}

// String gives one line of a timeline.
func (r TraceRecord) String() string {
	return fmt.Sprintf("%10.2f %10.2f us  device %d stream %#x  %s %s %d bytes", r.StartMicros, r.EndMicros, r.Device, uintptr(r.Stream), r.Kind, r.Name, r.Bytes)
}

// Trace starts (and drops what was recorded before) or stops the recording of finished operations.
func Trace(on bool) { core.EmulatedTrace(on) }

// TraceRecords gives what was recorded, in the order of the operations' ends.
func TraceRecords() []TraceRecord {
	all := core.EmulatedTraceRead()
	out := make([]TraceRecord, len(all))
	for i, r := range all {
		out[i] = TraceRecord{
			StartMicros: r.StartUs, EndMicros: r.EndUs, Device: int(r.Device), Kind: TraceKind(r.Kind),
			Stream: Stream(r.Stream), Bytes: r.Bytes, Name: r.Name,
		}
	}
	return out
}

// Hazards counts the accesses that nothing orders (no stream, event, graph edge, flag or waiting host call), found since
// the emulated machine was made, whatever its schedule did. Report has the first, with both accesses and the seed; from
// then on calls on that device return ErrHazard.
func Hazards() int64 { return core.EmulatedHazards() }

// Report is the first hazard or else the last deadlock or misuse report of the emulated machine, for people; "" if there
// is none.
func Report() string { return core.EmulatedReport() }

// LiveObjects counts the allocations, streams, events and graphs of the emulated machine that are alive.
func LiveObjects() int64 { return core.EmulatedLiveObjects() }

// PeerFault is what goes wrong when one emulated device uses peer access to another, although the driver grants it.
type PeerFault int32

// The faults.
const (
	PeerGood     PeerFault = 0
	PeerDropped  PeerFault = 1 // stores and copies never arrive
	PeerDelayed  PeerFault = 2 // a kernel's stores of 16 bytes arrive when it has ended; flags overtake them
	PeerMirrored PeerFault = 3 // stores and copies land in a mirror of the writer's own, and read back fine there
	PeerBounced  PeerFault = 4 // right, but through the host: slower than staging there would be
	PeerHang     PeerFault = 5 // the access never ends, nor does whoever waits for it
)

// FailPeer puts a fault on dev's access to peer's memory, on the emulated machine, until it is configured anew.
func FailPeer(dev, peer int, fault PeerFault) error {
	if e := core.EmulatedPeerFault(dev, peer, int32(fault)); e != nil {
		return Driver{Emulated}.wrap("FailPeer", dev, e)
	}
	return nil
}
