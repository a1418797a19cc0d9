package device

import (
	"fmt"

	"gpu.example/allreduce/internal/core"
)

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

// TraceRecord is one operation, in microseconds on one clock for all devices, whose zero means nothing.
type TraceRecord struct {
	StartMicros, EndMicros float64
	Device                 int
	Kind                   TraceKind
	Stream                 Stream
	Bytes                  int64  // of a copy or fill
	Name                   string // the kernel's, "copy" or "fill"
}

// String gives one line of a timeline.
func (r TraceRecord) String() string {
	return fmt.Sprintf("%10.2f %10.2f us  device %d stream %#x  %s %s %d bytes", r.StartMicros, r.EndMicros, r.Device, uintptr(r.Stream), r.Kind, r.Name, r.Bytes)
}

// TraceStart records from now on what this library enqueues on these devices, and drops earlier records. It waits for the
// devices. On CUDA two timing events stand around each operation, which costs the host about 2 us, and the devices' clocks are
// compared through the host's, to a few microseconds; what goes into a graph is not recorded there. Emulated devices record
// everything, in simulated time. There is one trace at a time in a process.
func (d Driver) TraceStart(devices ...int) error {
	return d.wrap("TraceStart", -1, core.TraceStart(int32(d.backend), devices))
}

// TraceStop ends the recording, waits for what was recorded, and gives it in the order of the operations' ends.
func (d Driver) TraceStop() ([]TraceRecord, error) {
	if err := d.wrap("TraceStop", -1, core.TraceStop(int32(d.backend))); err != nil {
		return nil, err
	}
	all, e := core.TraceRead(int32(d.backend))
	if err := d.wrap("TraceStop", -1, e); err != nil {
		return nil, err
	}
	out := make([]TraceRecord, len(all))
	for i, r := range all {
		out[i] = TraceRecord{
			StartMicros: r.StartUs, EndMicros: r.EndUs, Device: int(r.Device), Kind: TraceKind(r.Kind),
			Stream: Stream(r.Stream), Bytes: r.Bytes, Name: r.Name,
		}
	}
	return out, nil
}
