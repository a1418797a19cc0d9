// Package core is the only importer of "C" in this module: it holds the Go side of csrc/include/allreduce.h and
// allreduce_emulated.h and nothing else. The packages allreduce and device stand on it; programs use those.
//
// Without the build tag cuda, cgo compiles the emulated backend from csrc (core_emulated.cpp); with it, cgo links
// build/liballreduce.a, which holds both backends. Without cgo, or on another platform than Linux on amd64 and arm64,
// every function that can fail fails with ErrNoCgo or ErrPlatform (core_stub.go).
//
// Every function is one call of the C function named in its comment; all are safe for concurrent use. Nothing passed in
// is kept after a call. Device pointers, streams, events and graphs are the C API's 64-bit integers.
package core

// MaxRanks is AR_MAX_RANKS, Paths is AR_PATHS, MaxEmulatedDevices is AR_EMULATED_MAX_DEVICES; layout_cgo.go asserts it.
const (
	MaxRanks           = 8
	Paths              = 5
	MaxEmulatedDevices = 16
)

// The backends (ar_backend).
const (
	BackendCUDA     int32 = 1
	BackendEmulated int32 = 2
)

// The paths (ar_path).
const (
	PathNone       int32 = 0
	PathInternal   int32 = 1
	PathCopyEngine int32 = 2
	PathPeer       int32 = 3
	PathNCCL       int32 = 4
)

// Buffer mirrors ar_buffer byte for byte (asserted in layout_cgo.go), so that an array of them is handed to C as it is.
// It holds no Go pointers.
type Buffer struct {
	Send, Recv           uint64
	Count                int64
	Type, Op             int32
	Stream               uint64
	Absent, Rows         int32
	SendPitch, RecvPitch int64
}

// Options mirrors ar_options in Go terms; zero fields take the C API's defaults.
type Options struct {
	Backend       int32
	Devices       []int32   // device of each rank; its length is the number of ranks
	LinkGBs       []float64 // rate of each rank's host link, one direction; nil or 0: unknown
	RingBytes     int64
	ChunkBytes    int64
	Blocks        int32
	SpinTimeoutMs int32
	NoOp          bool
	NCCLLib       string // libnccl to open, "" for none
	NCCLNoPeer    bool   // NCCL must not use peer access
	FirstEpoch    uint32 // for tests of wrap-around
	Peer          bool   // path peer may be used: peer access was proven, or is trusted

	// One communicator over several processes: the ranks of this one, ascending (empty: all), the file they share (-1: none,
	// they are on several hosts), and NCCL's id (nil: no NCCL).
	Ranks    []int32
	SharedFD int
	NCCLID   []byte
}

// Stats mirrors ar_stats in Go terms.
type Stats struct {
	Calls, Bytes [Paths]uint64
	Allocations  uint64
	ChunkBytes   int
	NCCLVersion  int
	Ranks        []RankStats
}

// RankStats mirrors ar_rank_stats.
type RankStats struct {
	Rank, Device             int
	DeviceBytes, PinnedBytes [Paths]int64
}

// DeviceInfo mirrors ar_device_info.
type DeviceInfo struct {
	Name, UUID, BusID string
	CCMajor, CCMinor  int
	SMs, CopyEngines  int
	MemoryBytes       int64
	Simulated         bool
}

// BenchRows mirrors ar_bench_rows.
type BenchRows struct {
	Got, Want          uint64
	Rows, Count, Pitch int64
	Type               int32
	Tolerance          float32
}

// BenchCounters is AR_BENCH_COUNTERS; layout_cgo.go asserts it.
const BenchCounters = 65536

// ProbeResult mirrors ar_probe_result.
type ProbeResult struct {
	Verdict                                 int32 // ar_probe_verdict
	CopyGBs, StoreGBs, StagedGBs, LatencyUs float64
	Detail                                  string
}

// The verdicts (ar_probe_verdict).
const (
	ProbeOK           int32 = 0
	ProbeSlow         int32 = 1
	ProbeBroken       int32 = 2
	ProbeUnsupported  int32 = 3
	ProbeInconclusive int32 = 4
	ProbeTimeout      int32 = 5
)

// EmulatedDevice mirrors ar_emulated_device: rates in GB/s, zero fields take the defaults. Uplink is -1 for none.
type EmulatedDevice struct {
	H2DGBs, D2HGBs, DuplexGBs, MemoryGBs, KernelHostGBs float64
	SMs, ResidentBlocks, CCMajor, CCMinor, Uplink       int32
	MemoryBytes                                         int64
}

// EmulatedMachine mirrors ar_emulated_machine. Peer is empty or square.
type EmulatedMachine struct {
	Devices                         []EmulatedDevice
	UplinkGBs                       []float64
	HostGBs, PeerGBs                float64
	Peer                            [][]bool
	CopyUs, LaunchUs, HopUs, FlagUs float64
	Drive, Schedule                 int32
	Seed                            uint64
}

// TraceRecord mirrors ar_trace_record.
type TraceRecord struct {
	StartUs, EndUs float64
	Device, Kind   int32
	Stream         uint64
	Bytes          int64
	Name           string
}

// EmulatedOrder is one ordering primitive (csrc/order.h) and how often it was passed since the machine was configured.
type EmulatedOrder struct {
	ID         int32
	Name, Text string
	Count      int64
}
