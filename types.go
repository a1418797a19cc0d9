package allreduce

import (
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"time"
)

// Type is the element type of a payload or of a wire. The numbers are those of the C API (ar_type in allreduce.h).
type Type int32

// The element types. F32, F16 and BF16 are served by every path; F64 and the integers (sum only) exist through NCCL only.
const (
	F32  Type = 0 // IEEE binary32, 4 bytes
	F16  Type = 1 // IEEE binary16, 2 bytes
	BF16 Type = 2 // upper half of a binary32, 2 bytes
	F64  Type = 3 // IEEE binary64, 8 bytes
	I64  Type = 4 // signed, 8 bytes
	I32  Type = 5 // signed, 4 bytes
	I8   Type = 6 // signed, 1 byte
	U8   Type = 7 // unsigned, 1 byte

	// TypeNone is the wire of a route that has none (path none). It is never the type of a payload.
	TypeNone Type = -1

	numTypes = 8
)

var typeNames = [numTypes]string{"f32", "f16", "bf16", "f64", "i64", "i32", "i8", "u8"}

var typeSizes = [numTypes]int{4, 2, 2, 8, 8, 4, 1, 1}

func (t Type) valid() bool { return t >= 0 && t < numTypes }

// integer says whether t is one of the integer types, which have no average.
func (t Type) integer() bool { return t >= I64 && t <= U8 }

// String gives the lower-case name, as ParseType takes it: "f32"; "none" for TypeNone.
func (t Type) String() string {
	switch {
	case t.valid():
		return typeNames[t]
	case t == TypeNone:
		return "none"
	}
	return "type(" + strconv.Itoa(int(t)) + ")"
}

// Size is the number of bytes of one element; 0 for what is no element type.
func (t Type) Size() int {
	if !t.valid() {
		return 0
	}
	return typeSizes[t]
}

// ParseType reads a name as String gives it ("f32", "f16", "bf16", "f64", "i64", "i32", "i8", "u8"). Anything else is
// ErrArgument.
func ParseType(name string) (Type, error) {
	for i, known := range typeNames {
		if name == known {
			return Type(i), nil
		}
	}
	return TypeNone, newError("ParseType", ErrArgument, "%q is no element type; allowed: %s", name, strings.Join(typeNames[:], ", "))
}

// Op is what a reduction computes from the ranks' values. The numbers are those of the C API (ar_op).
type Op int32

// The operations.
const (
	Sum Op = 0 // the values added in rank order, in F32, starting with rank 0's value
	Avg Op = 1 // the same sum divided by the number of ranks, absent ones counted; not for integers

	numOps = 2
)

func (o Op) valid() bool { return o >= 0 && o < numOps }

// String gives "sum" or "avg".
func (o Op) String() string {
	switch o {
	case Sum:
		return "sum"
	case Avg:
		return "avg"
	}
	return "op(" + strconv.Itoa(int(o)) + ")"
}

// Path is the way the bytes of a reduction take. The numbers are those of the C API (ar_path).
type Path int32

// The paths.
const (
	PathNone       Path = 0 // nothing is exchanged: no elements, or one rank
	PathInternal   Path = 1 // one kernel per GPU through mapped pinned host memory: small reductions
	PathCopyEngine Path = 2 // copy engines through a pinned ring, no SM in the transfer: large reductions
	PathPeer       Path = 3 // direct stores between GPUs whose peer access is proven
	PathNCCL       Path = 4 // libnccl, opened at run time

	numPaths = 5
)

var pathNames = [numPaths]string{"none", "internal", "copy-engine", "peer", "nccl"}

// String gives "none", "internal", "copy-engine", "peer" or "nccl".
func (p Path) String() string {
	if p >= 0 && p < numPaths {
		return pathNames[p]
	}
	return "path(" + strconv.Itoa(int(p)) + ")"
}

// Backend chooses what a communicator's devices are.
type Backend int32

// The backends.
const (
	// BackendAuto is BackendCUDA: a library never hands out simulated GPUs unasked. (The command's auto falls back to
	// emulated devices, and says so.)
	BackendAuto     Backend = 0
	BackendCUDA     Backend = 1 // real GPUs; ErrBackend where the build has none, ErrNoDevice where the machine has none
	BackendEmulated Backend = 2 // simulated devices with a simulated clock; the same code everywhere else
)

// String gives "auto", "cuda" or "emulated".
func (b Backend) String() string {
	switch b {
	case BackendAuto:
		return "auto"
	case BackendCUDA:
		return "cuda"
	case BackendEmulated:
		return "emulated"
	}
	return "backend(" + strconv.Itoa(int(b)) + ")"
}

// Switch is a setting that is on, off or left to the environment variable and its default.
type Switch int8

// The positions of a Switch; the zero value leaves the decision to the variable.
const (
	Unset Switch = 0
	On    Switch = 1
	Off   Switch = 2
)

// Algorithm is the choice of GGML_CUDA_ALLREDUCE: which path, or the routing table.
type Algorithm int8

// The algorithms. All but Auto and None force one path: it ignores the size thresholds, and New fails where it cannot
// exist.
const (
	AlgorithmUnset      Algorithm = 0
	AlgorithmAuto       Algorithm = 1 // the routing table decides by size, type and machine
	AlgorithmInternal   Algorithm = 2
	AlgorithmCopyEngine Algorithm = 3
	AlgorithmPeer       Algorithm = 4
	AlgorithmNCCL       Algorithm = 5
	AlgorithmNone       Algorithm = 6 // New succeeds, AllReduce returns ErrDisabled: the caller reduces by itself
)

// Prefer says what large reductions are optimised for.
type Prefer int8

// The preferences.
const (
	PreferUnset   Prefer = 0
	PreferOverlap Prefer = 1 // keep the SMs free from 512 KiB on, so that compute beside a reduction is not slowed
	PreferLatency Prefer = 2 // whatever was measured fastest alone
)

// WireChoice forces the wire of F32 payloads on every path. F16 and BF16 payloads always travel as they are.
type WireChoice int8

// The wires.
const (
	WireUnset WireChoice = 0
	WireAuto  WireChoice = 1 // BF16Threshold decides
	WireF32   WireChoice = 2 // exact
	WireBF16  WireChoice = 3
	WireF16   WireChoice = 4 // values beyond 65504 become infinite
)

// P2PMode says when peer access between GPUs may be used.
type P2PMode int8

// The modes.
const (
	P2PUnset P2PMode = 0
	P2PAuto  P2PMode = 1 // only where a probe has proven it
	P2POff   P2PMode = 2 // never (GGML_CUDA_P2P=0)
	P2PTrust P2PMode = 3 // wherever the driver reports it, with a warning (GGML_CUDA_P2P=1)
)

// Named constants for settings whose zero has a meaning, since the zero value of a Config field means "not set".
const (
	BF16Never      int64 = -1 // Config.BF16Threshold: exact F32 on every path
	ChunkByLink    int64 = -1 // Config.CopyChunkBytes: by the link's rate
	BlocksMeasured int   = -1 // Config.Blocks: the measured number
	TraceNone      int   = -1 // Config.Trace: log nothing
)

// Config says what New or Join shall make. A field at its zero value is not set: then the environment variable counts,
// then the default, so that New(Config{}) is the defaults. A set field wins over the variable. Sizes are bytes of the
// caller's payload per GPU (for F32: 4 x elements) unless said otherwise. Variables() lists the variables.
type Config struct {
	// Backend is what the devices are; auto means cuda.
	Backend Backend
	// Ranks is the number of ranks, 1 to 8; 0: one per entry of Devices, else one per visible device.
	Ranks int
	// Devices[i] is the device ordinal of rank i, as the backend counts; several ranks may share a device. Nil: rank i
	// on device i. Where both are set, its length is Ranks.
	Devices []int
	// Logger receives warnings and one line per lazy allocation. Nil: silent (TRACE and NOOP from the environment then
	// log to standard error); warnings are kept in Stats either way.
	Logger *slog.Logger

	// Algorithm forces a path or leaves it to the routing table (GGML_CUDA_ALLREDUCE, default auto).
	Algorithm Algorithm
	// CopyEngine allows the copy engines (GGML_CUDA_AR_CE, default on). Off: large reductions go to NCCL, without NCCL
	// to internal.
	CopyEngine Switch
	// CEMinBytes is the payload from which on the copy engines serve, at least 1 (GGML_CUDA_AR_CE_MIN_BYTES, 512 KiB).
	CEMinBytes int64
	// Prefer moves that border to the measured crossover when latency is preferred and CEMinBytes is not set
	// (GGML_CUDA_AR_PREFER, default overlap).
	Prefer Prefer
	// NCCLMinBytes is the payload from which on NCCL serves where it exists, at least 1; it changes nothing below
	// (GGML_CUDA_AR_NCCL_MIN_BYTES, default: no such border).
	NCCLMinBytes int64
	// BF16Threshold is the F32 payload from which on BF16 travels, on every path; BF16Never: exact F32 everywhere
	// (GGML_CUDA_AR_BF16_THRESHOLD; default: copy-engine always, nccl from 512 KiB, internal and peer never).
	BF16Threshold int64
	// Wire forces the wire of F32 payloads (GGML_CUDA_AR_WIRE, default auto).
	Wire WireChoice
	// PeerMinBytes and PeerMaxBytes bound the payloads the peer path serves (GGML_CUDA_AR_PEER_MIN_BYTES, _MAX_BYTES;
	// default: as measured).
	PeerMinBytes, PeerMaxBytes int64

	// CopyChunkBytes is the size of one copy on the wire, 64 KiB to half of RingBytes; ChunkByLink: by the link's rate
	// (GGML_CUDA_AR_COPY_CHUNK_BYTES, default by link).
	CopyChunkBytes int64
	// RingBytes is the pinned memory of the copy engines' ring per GPU, 1 to 256 MiB (GGML_CUDA_AR_RING_BYTES, 8 MiB).
	RingBytes int64
	// Blocks is the number of blocks of the internal and peer kernels, 1 to 128; BlocksMeasured: the measured number
	// (GGML_CUDA_AR_BLOCKS, default measured).
	Blocks int
	// SpinTimeout is the deadline of every wait on a device, 1 ms to 1 h (GGML_CUDA_AR_SPIN_TIMEOUT_MS, 10 s).
	SpinTimeout time.Duration
	// P2P says when peer access may be used (GGML_CUDA_P2P, default auto).
	P2P P2PMode
	// Trace logs the first so many reductions with path, reason, bytes and chunks (GGML_CUDA_AR_TRACE, default none).
	Trace int
	// NoOp routes but moves nothing, to measure a program's ceiling: results are wrong on purpose, and a warning says
	// so (GGML_CUDA_AR_NOOP, default off).
	NoOp Switch
	// Emulated names the file that describes the emulated machine (GGML_CUDA_AR_EMULATED; default: as many devices as
	// ranks, PCIe 5 x16, no peer access).
	Emulated string

	// Rendezvous is host:port for several hosts or a job name on one (GGML_CUDA_AR_RENDEZVOUS). Join only.
	Rendezvous string
	// SecretFile names the file with the shared secret of a TCP rendezvous, mode 0600 or less, 16 bytes or more
	// (GGML_CUDA_AR_SECRET_FILE). Join only.
	SecretFile string
	// CacheDir is the folder of peer-access verdicts and of the machine file (GGML_CUDA_AR_CACHE_DIR,
	// $XDG_CACHE_HOME/allreduce). Verdicts of emulated devices are read only where it is set.
	CacheDir string
	// NCCLLib is the NCCL library to open (GGML_CUDA_NCCL_LIB, libnccl.so.2). Not yet: there is no nccl path.
	NCCLLib string
	// ProbeCommand is the allreduce command that proves peer access; empty: beside the executable, then PATH.
	ProbeCommand string
}

// Route is the way one reduction takes.
type Route struct {
	Path   Path
	Wire   Type   // the type that travels; TypeNone for path none
	Reason string // one sentence: the variable or the measured fact that decided
}

// String gives "copy-engine (wire bf16): reason".
func (r Route) String() string {
	if r.Wire == TypeNone {
		return fmt.Sprintf("%s: %s", r.Path, r.Reason)
	}
	return fmt.Sprintf("%s (wire %s): %s", r.Path, r.Wire, r.Reason)
}
