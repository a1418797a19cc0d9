package allreduce

import (
	"errors"
	"fmt"
	"strings"

	"gpu.example/allreduce/internal/core"
)

// The sentinels every error of this package unwraps to; test with errors.Is. Package device fails with the same values.
var (
	// ErrArgument: an argument of a call is wrong; nothing was enqueued.
	ErrArgument = core.ErrArgument
	// ErrSetting: a Config field or an environment variable has a value that is not allowed.
	ErrSetting = errors.New("allreduce: setting not allowed")
	// ErrNoDevice: the machine has no such GPU, or none at all.
	ErrNoDevice = core.ErrNoDevice
	// ErrNoCgo: the program was built with CGO_ENABLED=0.
	ErrNoCgo = core.ErrNoCgo
	// ErrPlatform: the operating system or processor is not supported (Linux on amd64 and arm64 is).
	ErrPlatform = core.ErrPlatform
	// ErrBackend: the backend asked for is not compiled in (CUDA needs the build tag cuda).
	ErrBackend = core.ErrBackend
	// ErrAlloc: device or pinned memory could not be allocated.
	ErrAlloc = core.ErrAlloc
	// ErrRuntime: a call into the GPU runtime failed; Error.Code is its code.
	ErrRuntime = core.ErrRuntime
	// ErrTimeout: a wait on a device ran past its deadline; the communicator is unusable, outputs are undefined.
	ErrTimeout = core.ErrTimeout
	// ErrMismatch: ranks disagree about a reduction; the message names both sides.
	ErrMismatch = core.ErrMismatch
	// ErrClosed: the communicator was closed.
	ErrClosed = core.ErrClosed
	// ErrCaptureMixed: some streams of a call are capturing and others are not, or in a way that cannot be captured.
	ErrCaptureMixed = core.ErrCaptureMixed
	// ErrNotCapturable: this path cannot be captured like this.
	ErrNotCapturable = core.ErrNotCapturable
	// ErrUnsupported: no path here can take this type, layout or number of ranks.
	ErrUnsupported = core.ErrUnsupported
	// ErrDisabled: GGML_CUDA_ALLREDUCE=none; the caller reduces by itself.
	ErrDisabled = errors.New("allreduce: disabled")
	// ErrNCCL: NCCL is missing, refused or failed.
	ErrNCCL = core.ErrNCCL
	// ErrDeviceLost: a device or its context is gone; the process has to be restarted to use it again.
	ErrDeviceLost = core.ErrDeviceLost
	// ErrDeadlock: the emulator found waits that nothing can end; the message lists every waiter.
	ErrDeadlock = core.ErrDeadlock
	// ErrPeerLost: the process of another rank has ended (Join); the communicator is unusable, outputs are undefined.
	ErrPeerLost = core.ErrPeerLost
	// ErrHazard: the emulator found two accesses that nothing orders (a missing wait, most likely of the program's own
	// streams); the message names both. device.Report has all of it.
	ErrHazard = core.ErrHazard
)

// Error is the type of every error this package returns: errors.As finds the details, errors.Is the sentinel.
type Error struct {
	Op      string // the call that failed: "New", "AllReduce", ...
	Rank    int    // the rank it concerns, -1 where it concerns none in particular
	Device  int    // the device ordinal it concerns, -1 where none
	Code    int    // the GPU runtime's or NCCL's own code, 0 where there is none
	Err     error  // the sentinel
	Message string // one sentence for people; empty: the sentinel's text

	// For ErrTimeout and ErrMismatch: which wait it was. Peer is -1 for every other error.
	Call    uint64 // number of the reduction on this communicator, from 1
	Phase   string // what the rank was doing: "internal flags", "copy-engine download", ...
	Peer    int    // the rank that was waited for
	Seen    uint32 // the last value read
	Awaited uint32 // the value that would have ended the wait
}

// Error gives one sentence: operation, rank and device, what happened, the platform's code, the wait.
func (e *Error) Error() string {
	var b strings.Builder
	b.WriteString("allreduce: ")
	if e.Op != "" {
		b.WriteString(e.Op + ": ")
	}
	switch {
	case e.Rank >= 0 && e.Device >= 0:
		fmt.Fprintf(&b, "rank %d on device %d: ", e.Rank, e.Device)
	case e.Rank >= 0:
		fmt.Fprintf(&b, "rank %d: ", e.Rank)
	case e.Device >= 0:
		fmt.Fprintf(&b, "device %d: ", e.Device)
	}
	switch {
	case e.Message != "":
		b.WriteString(e.Message)
	case e.Err != nil:
		b.WriteString(strings.TrimPrefix(e.Err.Error(), "allreduce: "))
	default:
		b.WriteString("unknown error")
	}
	if e.Code != 0 {
		fmt.Fprintf(&b, " (code %d)", e.Code)
	}
	if e.Phase != "" {
		fmt.Fprintf(&b, " (call %d, %s", e.Call, e.Phase)
		if e.Peer >= 0 {
			fmt.Fprintf(&b, ", waiting for rank %d", e.Peer)
		}
		fmt.Fprintf(&b, ": saw %d, awaited %d)", e.Seen, e.Awaited)
	}
	return b.String()
}

// Unwrap gives the sentinel.
func (e *Error) Unwrap() error { return e.Err }

// newError makes an error that concerns no rank in particular.
func newError(op string, sentinel error, format string, args ...any) *Error {
	return &Error{Op: op, Rank: -1, Device: -1, Peer: -1, Err: sentinel, Message: fmt.Sprintf(format, args...)}
}
