// Package device is the little a Go program without CUDA bindings of its own needs beside package allreduce: count
// devices, allocate, copy, streams, events and graph capture, on real GPUs or on emulated ones, through one interface.
// Programs that have CUDA bindings need none of it: a Ptr is a CUdeviceptr, a Stream a cudaStream_t.
//
//	d, err := device.Open(device.Emulated)
//	p, err := d.Malloc(0, 4096)                    // 4096 bytes on device 0
//	err = d.CopyToDevice(0, p, device.Bytes(vals)) // from a []float32
//	defer d.Free(0, p)
//
// Sizes are bytes. Everything a Driver hands out belongs to the caller, who frees or destroys it with the function named
// in its comment, on the device it was made on; nothing is garbage-collected. All functions may be called from any
// goroutine, and each leaves the thread's current device as it found it. What they fail with is an *Error that unwraps
// to one of this package's sentinels, which are the same values as those of package allreduce.
//
// emulated.go describes and steers the emulated machine.
package device

import (
	"fmt"
	"strconv"
	"time"
	"unsafe"

	"gpu.example/allreduce/internal/core"
)

// Ptr is an address in device memory, or in pinned host memory that devices reach. It is an integer on purpose: Go must
// neither follow nor collect it. Arithmetic in bytes is allowed.
type Ptr uintptr

// Stream is a queue of work on one device; 0 is the device's legacy default stream, which cannot be captured.
type Stream uintptr

// Event marks a point in a stream.
type Event uintptr

// Graph is an instantiated graph, captured once and launched any number of times.
type Graph uintptr

// Backend says what the devices are. The numbers are those of allreduce.Backend, which also has an auto.
type Backend int32

// The backends.
const (
	CUDA     Backend = 1 // real GPUs; the build tag cuda compiles it in
	Emulated Backend = 2 // simulated devices with a simulated clock, always there
)

// String gives "cuda" or "emulated".
func (b Backend) String() string {
	switch b {
	case CUDA:
		return "cuda"
	case Emulated:
		return "emulated"
	}
	return "backend(" + strconv.Itoa(int(b)) + ")"
}

// Driver is one backend's devices. It is a plain value: copy it freely, nothing is to be closed. The zero Driver is
// no backend; every call of it fails with ErrArgument.
type Driver struct {
	backend Backend
}

// Open gives the driver of a backend. It fails with ErrBackend where this build does not hold it, ErrNoCgo and
// ErrPlatform where it holds none, ErrArgument for what is no backend, and ErrNoDevice for a machine without a device.
func Open(backend Backend) (Driver, error) {
	d := Driver{backend}
	n, err := d.Count()
	if err == nil && n == 0 {
		err = &Error{Op: "Open", Backend: backend, Device: -1, Err: ErrNoDevice, Message: "this machine has no device"}
	}
	if err != nil {
		return Driver{}, err
	}
	return d, nil
}

// Backend says what the driver's devices are.
func (d Driver) Backend() Backend { return d.backend }

// Count is the number of devices; their ordinals are 0 to Count-1.
func (d Driver) Count() (int, error) {
	n, e := core.DeviceCount(int32(d.backend))
	return n, d.wrap("Count", -1, e)
}

// Info describes one device.
type Info struct {
	Name             string
	UUID             string // "GPU-..."
	BusID            string // "0000:1b:00.0"
	CCMajor, CCMinor int    // compute capability
	SMs              int    // streaming multiprocessors
	CopyEngines      int
	MemoryBytes      int64
	Simulated        bool // an emulated device: its times are those of a model
}

// Info describes device dev.
func (d Driver) Info(dev int) (Info, error) {
	i, e := core.GetDeviceInfo(int32(d.backend), dev)
	return Info(i), d.wrap("Info", dev, e)
}

// CanAccessPeer says whether the driver reports that dev may access peer's memory. That is no proof that it works.
func (d Driver) CanAccessPeer(dev, peer int) (bool, error) {
	can, e := core.CanAccessPeer(int32(d.backend), dev, peer)
	return can, d.wrap("CanAccessPeer", dev, e)
}

// Malloc allocates bytes on a device; Free gives them back. ErrAlloc where there is not enough.
func (d Driver) Malloc(dev int, bytes int64) (Ptr, error) {
	p, e := core.Malloc(int32(d.backend), dev, bytes)
	return Ptr(p), d.wrap("Malloc", dev, e)
}

// Free frees what Malloc gave. The caller sees to it that no work in flight uses it.
func (d Driver) Free(dev int, p Ptr) error {
	return d.wrap("Free", dev, core.Free(int32(d.backend), dev, uint64(p)))
}

// MallocHost allocates pinned host memory that every device reaches under the same address; FreeHost gives it back.
func (d Driver) MallocHost(bytes int64) (Ptr, error) {
	p, e := core.MallocHost(int32(d.backend), bytes)
	return Ptr(p), d.wrap("MallocHost", -1, e)
}

// FreeHost frees what MallocHost gave.
func (d Driver) FreeHost(p Ptr) error {
	return d.wrap("FreeHost", -1, core.FreeHost(int32(d.backend), uint64(p)))
}

// CopyToDevice copies src to device memory at dst and waits for it. It does not wait for streams made by NewStream:
// synchronise them first where they use dst.
func (d Driver) CopyToDevice(dev int, dst Ptr, src []byte) error {
	return d.wrap("CopyToDevice", dev, core.CopyToDevice(int32(d.backend), dev, uint64(dst), src))
}

// CopyToHost copies len(dst) bytes of device memory at src to dst and waits for it. It does not wait for streams made by
// NewStream: synchronise them first where they write src.
func (d Driver) CopyToHost(dev int, dst []byte, src Ptr) error {
	return d.wrap("CopyToHost", dev, core.CopyToHost(int32(d.backend), dev, dst, uint64(src)))
}

// CopyAsync enqueues a copy of bytes from src to dst, both on device dev, on stream s.
func (d Driver) CopyAsync(dev int, dst, src Ptr, bytes int64, s Stream) error {
	return d.wrap("CopyAsync", dev, core.CopyAsync(int32(d.backend), dev, uint64(dst), uint64(src), bytes, uint64(s)))
}

// FillAsync enqueues on stream s that bytes at dst are set to b.
func (d Driver) FillAsync(dev int, dst Ptr, b byte, bytes int64, s Stream) error {
	return d.wrap("FillAsync", dev, core.FillAsync(int32(d.backend), dev, uint64(dst), b, bytes, uint64(s)))
}

// NewStream makes a stream that does not synchronise with the legacy default stream; DestroyStream ends it.
func (d Driver) NewStream(dev int) (Stream, error) {
	s, e := core.StreamCreate(int32(d.backend), dev)
	return Stream(s), d.wrap("NewStream", dev, e)
}

// DestroyStream ends a stream; work already in it still runs.
func (d Driver) DestroyStream(dev int, s Stream) error {
	return d.wrap("DestroyStream", dev, core.StreamDestroy(int32(d.backend), dev, uint64(s)))
}

// Synchronize waits until everything enqueued on a stream so far has ended.
func (d Driver) Synchronize(dev int, s Stream) error {
	return d.wrap("Synchronize", dev, core.StreamSynchronize(int32(d.backend), dev, uint64(s)))
}

// Query says whether everything enqueued on a stream so far has ended, without waiting.
func (d Driver) Query(dev int, s Stream) (bool, error) {
	e := core.StreamQuery(int32(d.backend), dev, uint64(s))
	if e != nil && e.Status == core.StatusPending {
		return false, nil
	}
	return e == nil, d.wrap("Query", dev, e)
}

// SynchronizeDevice waits until everything enqueued on a device so far has ended.
func (d Driver) SynchronizeDevice(dev int) error {
	return d.wrap("SynchronizeDevice", dev, core.DeviceSynchronize(int32(d.backend), dev))
}

// NewEvent makes an event that takes times; DestroyEvent ends it.
func (d Driver) NewEvent(dev int) (Event, error) {
	ev, e := core.EventCreate(int32(d.backend), dev)
	return Event(ev), d.wrap("NewEvent", dev, e)
}

// DestroyEvent ends an event.
func (d Driver) DestroyEvent(dev int, ev Event) error {
	return d.wrap("DestroyEvent", dev, core.EventDestroy(int32(d.backend), dev, uint64(ev)))
}

// Record sets an event to the point a stream has come to; recording again moves it.
func (d Driver) Record(dev int, ev Event, s Stream) error {
	return d.wrap("Record", dev, core.EventRecord(int32(d.backend), dev, uint64(ev), uint64(s)))
}

// WaitEvent makes what is enqueued on s from now on wait for the event's last record; without one it waits for nothing.
// s is a stream of device dev, the event may be another device's.
func (d Driver) WaitEvent(dev int, s Stream, ev Event) error {
	return d.wrap("WaitEvent", dev, core.EventWait(int32(d.backend), dev, uint64(ev), uint64(s)))
}

// SynchronizeEvent waits until the event's last record has been reached.
func (d Driver) SynchronizeEvent(dev int, ev Event) error {
	return d.wrap("SynchronizeEvent", dev, core.EventSynchronize(int32(d.backend), dev, uint64(ev)))
}

// ElapsedMicros is the time between two recorded and reached events of one device, in microseconds (with CUDA to about
// half a microsecond, on emulated devices simulated time).
func (d Driver) ElapsedMicros(dev int, start, stop Event) (float64, error) {
	us, e := core.EventElapsedUs(int32(d.backend), dev, uint64(start), uint64(stop))
	return us, d.wrap("ElapsedMicros", dev, e)
}

// Elapsed is ElapsedMicros as a Duration.
func (d Driver) Elapsed(dev int, start, stop Event) (time.Duration, error) {
	us, err := d.ElapsedMicros(dev, start, stop)
	return time.Duration(us * float64(time.Microsecond)), err
}

// BeginCapture makes stream s record what is enqueued on it, and on streams that wait for its events, into a graph. It
// begins in relaxed mode, so that other goroutines may allocate meanwhile and EndCapture may be called from another
// thread.
func (d Driver) BeginCapture(dev int, s Stream) error {
	return d.wrap("BeginCapture", dev, core.CaptureBegin(int32(d.backend), dev, uint64(s)))
}

// EndCapture ends the capture that BeginCapture began on s; every stream that joined it must have been joined back into s. The graph
// is ready to be launched; DestroyGraph ends it.
func (d Driver) EndCapture(dev int, s Stream) (Graph, error) {
	g, e := core.CaptureEnd(int32(d.backend), dev, uint64(s))
	return Graph(g), d.wrap("EndCapture", dev, e)
}

// Launch enqueues a graph on a stream.
func (d Driver) Launch(dev int, g Graph, s Stream) error {
	return d.wrap("Launch", dev, core.GraphLaunch(int32(d.backend), dev, uint64(g), uint64(s)))
}

// DestroyGraph ends a graph; launches already enqueued still run.
func (d Driver) DestroyGraph(dev int, g Graph) error {
	return d.wrap("DestroyGraph", dev, core.GraphDestroy(int32(d.backend), dev, uint64(g)))
}

// Plain are the element types whose slices are plain bytes.
type Plain interface {
	~int8 | ~int16 | ~int32 | ~int64 | ~uint8 | ~uint16 | ~uint32 | ~uint64 | ~float32 | ~float64
}

// Bytes views a slice as its bytes, without copying: for CopyToDevice and CopyToHost.
func Bytes[T Plain](s []T) []byte {
	if len(s) == 0 {
		return nil
	}
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(s))), len(s)*int(unsafe.Sizeof(s[0])))
}

// Error is the type of every error of this package; errors.Is finds the sentinel.
type Error struct {
	Op      string // the call that failed: "Malloc", ...
	Backend Backend
	Device  int    // the device it concerns, -1 where none
	Code    int    // the GPU runtime's own code, 0 where there is none
	Err     error  // the sentinel
	Message string // one sentence
}

// Error gives one sentence: call, device, what happened, the runtime's code.
func (e *Error) Error() string {
	text := "device: " + e.Op + ": "
	if e.Device >= 0 {
		text += fmt.Sprintf("%s device %d: ", e.Backend, e.Device)
	}
	text += e.Message
	if e.Code != 0 {
		text += fmt.Sprintf(" (code %d)", e.Code)
	}
	return text
}

// Unwrap gives the sentinel.
func (e *Error) Unwrap() error { return e.Err }

// The sentinels, the same values as those of package allreduce.
var (
	ErrArgument     = core.ErrArgument     // a pointer, size, ordinal or handle is wrong
	ErrNoDevice     = core.ErrNoDevice     // no such device
	ErrNoCgo        = core.ErrNoCgo        // built with CGO_ENABLED=0
	ErrPlatform     = core.ErrPlatform     // not Linux on amd64 or arm64
	ErrBackend      = core.ErrBackend      // the backend is not compiled in
	ErrAlloc        = core.ErrAlloc        // not enough memory
	ErrRuntime      = core.ErrRuntime      // the GPU runtime failed; Error.Code is its code
	ErrCaptureMixed = core.ErrCaptureMixed // not allowed while a stream is captured
	ErrDeviceLost   = core.ErrDeviceLost   // a device or its context is gone
	ErrDeadlock     = core.ErrDeadlock     // the emulator found waits that nothing can end
	ErrHazard       = core.ErrHazard       // the emulator found two accesses that nothing orders
)

// CUDA's codes for a bad pointer or size and for a bad stream, event or graph; the emulated runtime uses the same.
const (
	invalidValue  = 1
	invalidHandle = 400
)

// wrap turns core's error into this package's; device is the one of the call where core names none.
func (d Driver) wrap(op string, dev int, e *core.Error) error {
	if e == nil {
		return nil
	}
	if e.Device >= 0 {
		dev = e.Device
	}
	sentinel := e.Sentinel()
	if e.Status == core.StatusRuntime && (e.Code == invalidValue || e.Code == invalidHandle) {
		sentinel = ErrArgument // here every argument is the caller's
	}
	return &Error{Op: op, Backend: d.backend, Device: dev, Code: e.Code, Err: sentinel, Message: e.Error()}
}

// Proof is what a probe of peer access found for one ordered pair.
type Proof struct {
	Verdict       ProofVerdict
	CopyGBs       float64 // peer copies of 1 MiB, one behind another
	StoreGBs      float64 // stores of a kernel
	StagedGBs     float64 // the same copies through pinned host memory
	LatencyMicros float64 // a flagged message of 4 KiB, one way
	Detail        string  // why; "" where the pair is ok
}

// ProofVerdict is the C API's ar_probe_verdict.
type ProofVerdict int32

// The verdicts.
const (
	ProofOK           ProofVerdict = 0
	ProofSlow         ProofVerdict = 1 // right, but slower than staging through the host
	ProofBroken       ProofVerdict = 2 // bytes did not arrive, or not in order
	ProofUnsupported  ProofVerdict = 3 // the driver denies it
	ProofInconclusive ProofVerdict = 4 // the control through pinned memory failed
	ProofTimeout      ProofVerdict = 5 // the process of the probe had to be ended (ProbePeer never says so itself)
)

// ProbePeer proves, or disproves, that dev may copy to, store to and load from peer's memory: one ordered pair, checked by
// the owner from its own memory. Where access is broken it may never return, and may end the process's context: it is for a
// process of its own that can be killed, as `allreduce probe` starts them. timeout (1 ms to 1 h) is the deadline of each
// wait of a kernel.
func (d Driver) ProbePeer(dev, peer int, timeout time.Duration) (Proof, error) {
	r, e := core.ProbePair(int32(d.backend), dev, peer, int(timeout/time.Millisecond))
	return Proof{
		Verdict: ProofVerdict(r.Verdict), CopyGBs: r.CopyGBs, StoreGBs: r.StoreGBs, StagedGBs: r.StagedGBs,
		LatencyMicros: r.LatencyUs, Detail: r.Detail,
	}, d.wrap("ProbePeer", dev, e)
}
