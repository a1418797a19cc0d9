package core

import "errors"

// The sentinels of this module. The packages allreduce and device publish them under the same names, so that one
// errors.Is serves errors of either package.
var (
	ErrArgument      = errors.New("allreduce: argument not allowed")
	ErrNoDevice      = errors.New("allreduce: no such device")
	ErrNoCgo         = errors.New("allreduce: built without cgo")
	ErrPlatform      = errors.New("allreduce: platform not supported")
	ErrBackend       = errors.New("allreduce: backend not compiled in")
	ErrAlloc         = errors.New("allreduce: allocation failed")
	ErrRuntime       = errors.New("allreduce: GPU runtime call failed")
	ErrTimeout       = errors.New("allreduce: deadline expired")
	ErrMismatch      = errors.New("allreduce: ranks disagree")
	ErrClosed        = errors.New("allreduce: communicator is closed")
	ErrCaptureMixed  = errors.New("allreduce: streams are captured in different ways")
	ErrNotCapturable = errors.New("allreduce: not capturable")
	ErrUnsupported   = errors.New("allreduce: not supported")
	ErrNCCL          = errors.New("allreduce: NCCL not usable")
	ErrDeviceLost    = errors.New("allreduce: device lost")
	ErrDeadlock      = errors.New("allreduce: deadlock")
	ErrHazard        = errors.New("allreduce: hazard")
	ErrPeerLost      = errors.New("allreduce: a rank's process is gone")
)

// Status is ar_status. StatusNoCgo and StatusPlatform are this package's own, for builds without the C core.
type Status int32

// The statuses, as in allreduce.h.
const (
	StatusOK            Status = 0
	StatusArgument      Status = 1
	StatusNoDevice      Status = 2
	StatusBackend       Status = 3
	StatusAlloc         Status = 4
	StatusRuntime       Status = 5
	StatusTimeout       Status = 6
	StatusMismatch      Status = 7
	StatusClosed        Status = 8
	StatusCaptureMixed  Status = 9
	StatusNotCapturable Status = 10
	StatusUnsupported   Status = 11
	StatusNCCL          Status = 12
	StatusDeviceLost    Status = 13
	StatusDeadlock      Status = 14
	StatusPending       Status = 15
	StatusHazard        Status = 16
	StatusPeerLost      Status = 17

	StatusNoCgo    Status = -1
	StatusPlatform Status = -2
)

var sentinels = map[Status]error{
	StatusArgument:      ErrArgument,
	StatusNoDevice:      ErrNoDevice,
	StatusBackend:       ErrBackend,
	StatusAlloc:         ErrAlloc,
	StatusRuntime:       ErrRuntime,
	StatusTimeout:       ErrTimeout,
	StatusMismatch:      ErrMismatch,
	StatusClosed:        ErrClosed,
	StatusCaptureMixed:  ErrCaptureMixed,
	StatusNotCapturable: ErrNotCapturable,
	StatusUnsupported:   ErrUnsupported,
	StatusNCCL:          ErrNCCL,
	StatusDeviceLost:    ErrDeviceLost,
	StatusDeadlock:      ErrDeadlock,
	StatusHazard:        ErrHazard,
	StatusPeerLost:      ErrPeerLost,
	StatusNoCgo:         ErrNoCgo,
	StatusPlatform:      ErrPlatform,
}

// Error is ar_error: what went wrong in a C call. Rank, Device and Peer are -1 where they do not apply; Call, Peer,
// Phase, Seen and Awaited are set for StatusTimeout and StatusMismatch.
type Error struct {
	Status        Status
	Code          int // the platform's own code
	Rank, Device  int
	Call          uint64
	Peer          int
	Seen, Awaited uint32
	Phase         string
	Message       string
}

// Error gives the message, or the sentinel's text where there is none.
func (e *Error) Error() string {
	if e.Message != "" {
		return e.Message
	}
	return e.Sentinel().Error()
}

// Sentinel gives the sentinel of the status; a status this build does not know is ErrRuntime.
func (e *Error) Sentinel() error {
	if s, ok := sentinels[e.Status]; ok {
		return s
	}
	return ErrRuntime
}

// Unwrap gives the sentinel.
func (e *Error) Unwrap() error { return e.Sentinel() }

func newError(status Status, message string) *Error {
	return &Error{Status: status, Rank: -1, Device: -1, Peer: -1, Message: message}
}
