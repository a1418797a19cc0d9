package device

import "gpu.example/allreduce/internal/core"

// What measurements need beside reductions: copies between host and device that no host waits for, a compute kernel, and a
// comparison that stays on the device. `allreduce perf` and `allreduce tune` stand on it.

// CopyKind is the direction of a copy.
type CopyKind int32

// The directions.
const (
	HostToDevice   CopyKind = 0
	DeviceToHost   CopyKind = 1
	DeviceToDevice CopyKind = 2
)

// CopyKindAsync enqueues a copy on stream s of device dev. The host's side is memory from MallocHost.
func (d Driver) CopyKindAsync(dev int, dst, src Ptr, bytes int64, kind CopyKind, s Stream) error {
	return d.wrap("CopyKindAsync", dev, core.CopyKindAsync(int32(d.backend), dev, uint64(dst), uint64(src), bytes, int32(kind), uint64(s)))
}

// Load enqueues a compute kernel that touches no memory: blocks of 1024 threads, each of which fills one multiprocessor (no
// other block fits beside it) for rounds of about a quarter of a microsecond. Measure it alone before relying on its time.
func (d Driver) Load(dev, blocks int, rounds int64, s Stream) error {
	return d.wrap("Load", dev, core.BenchLoad(int32(d.backend), dev, blocks, rounds, uint64(s)))
}

// Rows are two tensors of equal shape in memory of one device, Pitch bytes from row to row.
type Rows struct {
	Got, Want Ptr
	Rows      int
	Count     int // elements of a row
	Pitch     int64
	Type      int32   // allreduce.F32, F16 or BF16
	Tolerance float32 // 0: the bits must be equal; else values may differ by as much
}

// CountersBytes is the size of the device memory that Compare adds to, as 32-bit counters.
const CountersBytes = 4 * core.BenchCounters

// Compare enqueues a comparison: the number of elements that differ is added up over the counters at wrong.
func (d Driver) Compare(dev int, r Rows, wrong Ptr, s Stream) error {
	rows := core.BenchRows{Got: uint64(r.Got), Want: uint64(r.Want), Rows: int64(r.Rows), Count: int64(r.Count), Pitch: r.Pitch,
		Type: r.Type, Tolerance: r.Tolerance}
	return d.wrap("Compare", dev, core.BenchCompare(int32(d.backend), dev, rows, uint64(wrong), uint64(s)))
}
