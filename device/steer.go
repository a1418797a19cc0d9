package device

import (
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
