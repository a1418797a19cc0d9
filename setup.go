package allreduce

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"

	"gpu.example/allreduce/device"
	"gpu.example/allreduce/internal/core"
)

// version is the library's; a test compares it with the C core's (AR_VERSION_STRING).
const version = "0.1.0"

// Version is the version of the library, "0.1.0".
func Version() string { return version }

// Backends lists the backends compiled into this program: none without cgo, BackendEmulated always with it, BackendCUDA
// with the build tag cuda. It says nothing about what the machine has.
func Backends() []Backend {
	var list []Backend
	for _, b := range []Backend{BackendCUDA, BackendEmulated} {
		if core.HasBackend(int32(b)) {
			list = append(list, b)
		}
	}
	return list
}

// Build describes how the program was built, for `version` and for bug reports.
type Build struct {
	Backends    []Backend
	CUDARuntime int    // version of the CUDA runtime linked, 13000 for 13.0; 0 without one
	SourceHash  uint64 // of the C core's sources, as make passes it; 0 for a plain `go build`
}

// BuildInfo tells how the program was built.
func BuildInfo() Build {
	return Build{Backends: Backends(), CUDARuntime: core.RuntimeVersion(int32(BackendCUDA)), SourceHash: core.SourceHash()}
}

// servedTypes are the payloads that internal and copy-engine take, and the wires they have.
var servedTypes = typesOf(F32, F16, BF16)

// chooseBackend resolves auto and refuses what this build does not hold.
func chooseBackend(b Backend) (Backend, error) {
	if e := core.Available(); e != nil {
		return b, fromCore("", e)
	}
	if b == BackendAuto {
		b = BackendCUDA
	}
	if !core.HasBackend(int32(b)) {
		return b, newError("", ErrBackend, "this build holds the emulated backend only: build with -tags cuda for GPUs (make does), or choose BackendEmulated")
	}
	return b, nil
}

// applyMachine makes the emulated machine that the settings name.
func applyMachine(s *settings) error {
	m, err := device.LoadMachine(s.emulated)
	if err == nil {
		err = device.ConfigureOnce(m)
	}
	var e *device.Error
	switch {
	case err == nil:
		return nil
	case errors.As(err, &e) && e.Op == "Configure":
		return newError("", ErrSetting, "%s describes another emulated machine than the one in use (%s); name it before anything is allocated", s.emulated, e.Message)
	default:
		return newError("", ErrSetting, "GGML_CUDA_AR_EMULATED: %s", strings.TrimPrefix(err.Error(), "device: Machine: "))
	}
}

// chooseDevices gives the device of each rank.
func chooseDevices(s *settings, backend Backend) ([]int32, error) {
	count, e := core.DeviceCount(int32(backend))
	if e != nil {
		return nil, fromCore("", e)
	}
	if count == 0 {
		return nil, newError("", ErrNoDevice, "this machine has no %s device", backend)
	}
	ranks := s.ranks
	if s.devices != nil {
		ranks = len(s.devices)
	} else if ranks == 0 {
		ranks = min(count, maxRanks)
	}
	if ranks == 0 {
		return nil, newError("", ErrSetting, "Config.Devices is empty; allowed: nil, or 1 to %d ordinals", maxRanks)
	}
	list := make([]int32, ranks)
	for i := range list {
		ordinal := i
		if s.devices != nil {
			ordinal = s.devices[i]
		}
		if ordinal >= count {
			err := newError("", ErrNoDevice, "there is no device %d: this machine has %d (%s); name devices in Config.Devices, which may repeat", ordinal, count, backend)
			err.Rank, err.Device = i, ordinal
			return nil, err
		}
		list[i] = int32(ordinal)
	}
	return list, nil
}

// capabilitiesOf asks the core which paths exist for a communicator.
func capabilitiesOf(c *core.Comm, peers *peerAccess) capabilities {
	of := func(p Path) capability {
		ok, why := c.HasPath(int32(p))
		return capability{ok: ok, why: why, types: servedTypes, wires: servedTypes, strided: true}
	}
	nccl := of(PathNCCL)
	nccl.types, nccl.wires = ncclTypes, ncclTypes
	return capabilities{internal: of(PathInternal), copyEngine: of(PathCopyEngine), peer: of(PathPeer), nccl: nccl,
		verdict: peers.verdict, verdictWhy: peers.why}
}

// loggers gives the one for warnings and allocations (nil: silent) and the one for TRACE and NOOP, which go to standard
// error where the environment asks for them and there is no Logger.
func loggers(s *settings) (warnings, traces *slog.Logger) {
	if s.logger == nil && s.logStderr {
		return nil, slog.New(slog.NewTextHandler(os.Stderr, nil))
	}
	return s.logger, s.logger
}

// fromCore turns the core's error into this package's; op may be filled in later.
func fromCore(op string, e *core.Error) *Error {
	return &Error{
		Op: op, Rank: e.Rank, Device: e.Device, Code: e.Code, Err: e.Sentinel(), Message: e.Message,
		Call: e.Call, Phase: e.Phase, Peer: e.Peer, Seen: e.Seen, Awaited: e.Awaited,
	}
}

// withOp names the operation in an error of this package that does not name one.
func withOp(op string, err error) error {
	var e *Error
	if errors.As(err, &e) {
		if e.Op == "" {
			e.Op = op
		}
		return e
	}
	return &Error{Op: op, Rank: -1, Device: -1, Peer: -1, Err: err, Message: fmt.Sprint(err)}
}
