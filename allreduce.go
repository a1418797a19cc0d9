package allreduce

import (
	"context"
	"log/slog"
	"math"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"gpu.example/allreduce/device"
	"gpu.example/allreduce/internal/core"
)

// Ptr is an address in device memory: a CUdeviceptr, or what package device's Malloc gave. Arithmetic is in bytes.
type Ptr = device.Ptr

// Stream is a stream of the device of a buffer's rank: a cudaStream_t, or what package device's NewStream gave. 0 is the
// device's legacy default stream, which cannot be captured.
type Stream = device.Stream

// Buffer is one rank's part of a reduction. Count, Type, Op and Rows must be equal in all buffers of a call. The memory
// stays the caller's; it must live, and nobody else may write it, until the stream has passed the reduction.
type Buffer struct {
	// Send is where this rank's elements are read, Recv where the total is written: memory of the rank's device, aligned
	// to the element size at least (16 bytes is faster), equal (in place) or disjoint.
	Send, Recv Ptr
	// Count is the number of elements in all; 0 enqueues nothing.
	Count int
	Type  Type
	Op    Op
	// Stream is where the reduction is enqueued. It is not kept past the call.
	Stream Stream
	// Absent: this rank adds nothing. Send is ignored and may be 0 or hold NaN; Recv still gets the total.
	Absent bool
	// Rows > 1 makes the tensor Rows rows of Count/Rows elements, SendPitch and RecvPitch bytes apart (0: contiguous);
	// pitches may differ from rank to rank. 0 and 1 are one row.
	Rows                 int
	SendPitch, RecvPitch int64
}

// strided says whether there is a gap between rows.
func (b *Buffer) strided() bool {
	if b.Rows <= 1 {
		return false
	}
	row := int64(b.Count/b.Rows) * int64(b.Type.Size())
	gap := func(pitch int64) bool { return pitch != 0 && pitch != row }
	return gap(b.RecvPitch) || !b.Absent && gap(b.SendPitch)
}

// bytes is the payload; 0 for a count out of range, which the core refuses whatever the route.
func (b *Buffer) bytes() int64 {
	if b.Count < 0 || int64(b.Count) > math.MaxInt64/8 {
		return 0
	}
	return int64(b.Count) * int64(b.Type.Size())
}

// Comm is a communicator: the ranks that reduce together, each on its device, and the memory the paths need. All its
// methods may be called from any goroutine; eager reductions form one sequence, in the order in which AllReduce was
// entered, on every device. A Comm that is no longer needed must be closed.
type Comm struct {
	core    *core.Comm
	life    *lifetime
	backend Backend
	devices []int32 // of this process's ranks
	ranks   []int   // their numbers
	world   int     // ranks in all
	table   *routeTable
	party   *party // the other processes; nil: there are none

	log, traceLog *slog.Logger
	trace         atomic.Int64           // reductions still to be traced
	largest       [numPaths]atomic.Int64 // largest payload seen, where a logger wants to hear of allocations
	allocations   atomic.Uint64          // lazy allocations already told
	// failed holds what a path could not serve, one bit per type and layout (failureKey), so that later calls go straight
	// to the substitute.
	failed [numPaths]atomic.Uint32

	warnings struct {
		sync.Mutex
		list []string
	}
}

// lifetime is what the leak alarm looks at after the Comm is gone.
type lifetime struct {
	core   *core.Comm
	closed atomic.Bool
	log    *slog.Logger
	ranks  int
}

// New makes a communicator of all ranks in this process. It allocates the pinned memory of the internal path (under 4 MiB
// per rank) and, where peer access is proven, the peer path's (up to 32 MiB of device memory per rank); the copy engines'
// memory comes with the first large reduction, or with Prepare.
//
// Where the driver grants peer access between GPUs and no verdict is known for this boot, New runs the allreduce command,
// if it finds it, to prove it: about two seconds for each ordered pair, once a boot. Config.P2P says otherwise.
//
// It fails with ErrSetting for a Config field or an environment variable that is not allowed, ErrNoDevice where the
// machine has no such device, ErrBackend where the build does not hold the backend, ErrNoCgo and ErrPlatform where it
// holds none, ErrUnsupported or ErrNCCL where a forced path cannot exist, ErrAlloc and ErrRuntime for what the GPU
// runtime refused.
func New(cfg Config) (*Comm, error) {
	c, err := newComm(cfg)
	if err != nil {
		return nil, withOp("New", err)
	}
	return c, nil
}

func newComm(cfg Config) (*Comm, error) {
	if e := core.Available(); e != nil {
		return nil, fromCore("", e)
	}
	s, warnings, err := loadSettings(cfg, os.Environ())
	if err != nil {
		return nil, err
	}
	backend, err := chooseBackend(s.backend)
	if err != nil {
		return nil, err
	}
	if backend == BackendEmulated && s.emulated != "" {
		if err := applyMachine(&s); err != nil {
			return nil, err
		}
	}
	devices, err := chooseDevices(&s, backend)
	if err != nil {
		return nil, err
	}
	peers, err := lookAtPeers(&s, backend, devices)
	if err != nil {
		return nil, err
	}
	warnings = append(warnings, peers.warnings...)
	links, warning := linkRates(backend, devices)
	if warning != "" {
		warnings = append(warnings, warning)
	}
	handle, e := core.CreateComm(core.Options{
		Backend: int32(backend), Devices: devices, LinkGBs: links,
		RingBytes: s.ringBytes, ChunkBytes: s.copyChunkBytes, Blocks: int32(s.blocks),
		SpinTimeoutMs: int32(max(s.spinTimeout/time.Millisecond, 1)), NoOp: s.noop,
		NCCLLib: ncclLibrary(&s, backend), NCCLNoPeer: peers.forbidsNCCL(&s),
		Peer: peers.allowed(&s),
	})
	if e != nil {
		return nil, fromCore("", e)
	}
	caps := capabilitiesOf(handle, &peers)
	table, err := newRouteTable(&s, &caps, len(devices))
	if err != nil {
		handle.Free()
		return nil, err
	}
	c := &Comm{core: handle, backend: backend, devices: devices, world: len(devices), table: table}
	for r := range devices {
		c.ranks = append(c.ranks, r)
	}
	c.begin(&s, warnings)
	return c, nil
}

// begin turns on what surrounds a communicator that is made: logs, warnings, the leak alarm.
func (c *Comm) begin(s *settings, warnings []string) {
	c.log, c.traceLog = loggers(s)
	c.trace.Store(int64(s.trace))
	for _, w := range warnings {
		c.warn(w)
		if c.log == nil && c.traceLog != nil && strings.HasPrefix(w, "GGML_CUDA_AR_NOOP") {
			c.traceLog.Warn(w)
		}
	}
	c.life = &lifetime{core: c.core, log: c.log, ranks: len(c.devices)}
	runtime.AddCleanup(c, (*lifetime).end, c.life)
}

// end runs when a Comm is garbage. A closed one gives its handle back; one that was not closed is only reported, since
// closing may wait for devices and this goroutine serves every cleanup of the program.
func (l *lifetime) end() {
	if l.closed.Load() {
		l.core.Free()
	} else if l.log != nil {
		l.log.Warn("allreduce: a communicator was dropped without Close; its memory is lost", "ranks", l.ranks)
	}
}

// AllReduce enqueues one reduction on the buffers' streams and returns; bufs[i] is the part of this process's i-th rank, one
// per rank: all ranks' after New, this rank's alone after Join. Each
// rank's total is in its Recv once its stream has come this far. The host waits for nothing, and the call allocates
// nothing in Go.
//
// It fails, with nothing enqueued, with ErrArgument for a wrong buffer (the message names rank and value; of a bad
// pointer only emulated devices know), ErrDisabled for GGML_CUDA_ALLREDUCE=none, ErrUnsupported where no path takes the
// type or layout, ErrAlloc where no path could allocate, ErrCaptureMixed and ErrNotCapturable for streams captured in a
// way that cannot work, ErrClosed after Close, and with the communicator's latched failure (ErrTimeout, ErrMismatch,
// ErrDeviceLost) once it has one. After ErrRuntime and ErrNCCL part of the call may have been enqueued: the communicator
// is then unusable, or the capture to be abandoned, as the message says.
func (c *Comm) AllReduce(bufs []Buffer) error {
	if c == nil || c.core == nil {
		return newError("AllReduce", ErrClosed, "the communicator was not made by New")
	}
	if len(bufs) != len(c.devices) {
		return newError("AllReduce", ErrArgument, "%d buffers for %d ranks: one per rank is needed", len(bufs), len(c.devices))
	}
	var raw [maxRanks]core.Buffer // ar_buffer's layout; on the stack
	strided := false
	for i := range bufs {
		b := &bufs[i]
		if b.Rows < 0 || b.Rows > math.MaxInt32 {
			err := newError("AllReduce", ErrArgument, "Rows is %d; allowed: 0 to %d", b.Rows, math.MaxInt32)
			err.Rank, err.Device = c.ranks[i], int(c.devices[i])
			return err
		}
		raw[i] = core.Buffer{
			Send: uint64(b.Send), Recv: uint64(b.Recv), Count: int64(b.Count), Type: int32(b.Type), Op: int32(b.Op),
			Stream: uint64(b.Stream), Rows: int32(b.Rows), SendPitch: b.SendPitch, RecvPitch: b.RecvPitch,
		}
		if b.Absent {
			raw[i].Absent = 1
		}
		strided = strided || b.strided()
	}
	bytes, typ := bufs[0].bytes(), bufs[0].Type
	band, err := c.table.route(bytes, typ, bufs[0].Op, strided)
	if err != nil {
		return withOp("AllReduce", err)
	}
	key := failureKey(typ, strided)
	for {
		if band, err = c.skipFailed(band, key); err != nil {
			return withOp("AllReduce", err)
		}
		e := c.core.AllReduce(&raw[0], len(bufs), int32(band.Path), int32(band.wireOf(typ)))
		if e == nil {
			break
		}
		if !c.giveUp(band, key, e) {
			runtime.KeepAlive(c)
			return fromCore("AllReduce", e)
		}
	}
	if c.trace.Load() > 0 || c.log != nil {
		c.tell(band, bytes, typ)
	}
	runtime.KeepAlive(c)
	return nil
}

// wireOf is the wire to hand to the core: a band without one (path none) carries the payload as it is.
func (b *Band) wireOf(payload Type) Type {
	if b.Wire == TypeNone {
		return payload
	}
	return b.Wire
}

// failureKey is the bit of a type and layout in Comm.failed; the type is valid.
func failureKey(typ Type, strided bool) uint32 {
	bit := uint32(typ) * 2
	if strided {
		bit++
	}
	return 1 << bit
}

// everyKey are the bits of all types and layouts: memory that cannot be had fails them all.
const everyKey uint32 = 1<<(2*numTypes) - 1

// skipFailed follows a band's substitutes past the paths that failed before.
func (c *Comm) skipFailed(band *Band, key uint32) (*Band, error) {
	for c.failed[band.Path].Load()&key != 0 {
		next, err := c.table.next(band)
		if err != nil {
			return nil, err
		}
		band = next
	}
	return band, nil
}

// giveUp remembers that a path failed before anything was enqueued, if another serves in its place.
func (c *Comm) giveUp(band *Band, key uint32, e *core.Error) bool {
	if e.Status != core.StatusAlloc && e.Status != core.StatusUnsupported || band.fallback == nil {
		return false
	}
	if c.party != nil {
		return false // the other ranks would stay on this path
	}
	if e.Status == core.StatusAlloc {
		key = everyKey
	}
	if c.failed[band.Path].Or(key)&key != key { // said once, by whoever set it
		c.warn(band.Path.String() + " is given up (" + e.Error() + "); " + band.fallback.Path.String() + " serves in its place")
	}
	return true
}

// warn keeps a warning for Stats and logs it.
func (c *Comm) warn(text string) {
	c.warnings.Lock()
	seen := slices.Contains(c.warnings.list, text)
	if !seen {
		c.warnings.list = append(c.warnings.list, text)
	}
	c.warnings.Unlock()
	if !seen && c.log != nil {
		c.log.Warn("allreduce: " + text)
	}
}

// tell logs a traced reduction, and memory that was allocated for a payload larger than any before.
func (c *Comm) tell(band *Band, bytes int64, typ Type) {
	if c.log != nil && band.Path != PathNone {
		for seen := c.largest[band.Path].Load(); bytes > seen; seen = c.largest[band.Path].Load() {
			if c.largest[band.Path].CompareAndSwap(seen, bytes) {
				c.tellMemory(band.Path)
				break
			}
		}
	}
	if c.traceLog == nil || c.trace.Load() <= 0 || c.trace.Add(-1) < 0 {
		return
	}
	r := band.route(bytes)
	attrs := []any{"path", r.Path.String(), "wire", r.Wire.String(), "bytes", bytes, "reason", r.Reason}
	if r.Path == PathCopyEngine {
		if chunk := int64(c.coreStats().ChunkBytes); chunk > 0 {
			wire := bytes / int64(typ.Size()) * int64(r.Wire.Size())
			attrs = append(attrs, "chunk_bytes", chunk, "chunks", (wire+chunk-1)/chunk)
		}
	}
	c.traceLog.Info("allreduce", attrs...)
}

// tellMemory logs what a path holds if it allocated since this was last asked.
func (c *Comm) tellMemory(p Path) {
	s := c.coreStats()
	if c.allocations.Swap(s.Allocations) == s.Allocations {
		return
	}
	onDevice, pinned := memoryOf(s, p)
	c.log.Info("allreduce: memory allocated", "path", p.String(), "device_bytes", onDevice, "pinned_bytes", pinned, "ranks", len(s.Ranks))
}

func (c *Comm) coreStats() core.Stats {
	s := c.core.Stats()
	runtime.KeepAlive(c)
	return s
}

// Route tells which path a contiguous reduction of so many payload bytes per rank would take, without doing it. Where
// none would serve, Path is PathNone and Reason says why.
func (c *Comm) Route(bytes int64, typ Type, op Op) Route { return c.routeOf(bytes, typ, op, false) }

// RouteFor is Route for the reduction that b is part of, its layout included.
func (c *Comm) RouteFor(b Buffer) Route { return c.routeOf(b.bytes(), b.Type, b.Op, b.strided()) }

func (c *Comm) routeOf(bytes int64, typ Type, op Op, strided bool) Route {
	band, err := c.table.route(bytes, typ, op, strided)
	if err == nil {
		band, err = c.skipFailed(band, failureKey(typ, strided))
	}
	if err != nil {
		return Route{Path: PathNone, Wire: TypeNone, Reason: strings.TrimPrefix(err.Error(), "allreduce: ")}
	}
	return band.route(bytes)
}

// Prepare allocates what reductions of up to maxBytes payload per rank need, on every path the routing table gives them,
// and loads every kernel they may launch, so that no later call does either. types are the payloads to prepare for, none
// named: all that are served here. A path whose memory cannot be had is replaced as AllReduce would replace it, and one
// that failed before is tried again.
func (c *Comm) Prepare(maxBytes int64, types ...Type) error {
	if c == nil || c.core == nil {
		return newError("Prepare", ErrClosed, "the communicator was not made by New")
	}
	if maxBytes < 0 {
		return newError("Prepare", ErrArgument, "maxBytes is %d; allowed: 0 and up", maxBytes)
	}
	named := len(types) > 0
	if !named {
		types = []Type{F32, F16, BF16, F64, I64, I32, I8, U8}
	}
	for _, typ := range types {
		if !typ.valid() {
			return newError("Prepare", ErrArgument, "%s is no element type", typ)
		}
		for strided := range 2 {
			var least int64
			for i := range c.table.bands[typ][strided] {
				band := &c.table.bands[typ][strided][i]
				if least > maxBytes {
					break
				}
				least = band.MaxBytes
				if least < math.MaxInt64 {
					least++
				}
				if band.err != nil {
					if named && strided == 0 {
						failure := *band.err
						return withOp("Prepare", &failure)
					}
					continue
				}
				if err := c.prepareBand(band, min(band.MaxBytes, maxBytes), failureKey(typ, strided == 1)); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// prepareBand prepares a band's path, or the substitute that takes over.
func (c *Comm) prepareBand(band *Band, bytes int64, key uint32) error {
	for {
		e := c.core.Prepare(bytes, int32(band.Path))
		runtime.KeepAlive(c)
		if e == nil {
			c.failed[band.Path].Store(0)
			return nil
		}
		if !c.giveUp(band, key, e) {
			return fromCore("Prepare", e)
		}
		band = band.fallback
	}
}

// Wait returns when the eager reductions made so far have ended on every device, or when ctx is done, which it does not
// undo. It fails with ctx's error, with the communicator's failure if it has one, or with ErrClosed.
func (c *Comm) Wait(ctx context.Context) error {
	if c == nil || c.core == nil {
		return newError("Wait", ErrClosed, "the communicator was not made by New")
	}
	if ctx == nil {
		ctx = context.Background()
	}
	// Slices: short enough that a cancelled context is noticed soon, long enough that a long wait costs nothing.
	const shortest, longest = 200, 5000 // microseconds
	for slice := int64(shortest); ; slice = min(2*slice, longest) {
		if ctx.Done() == nil {
			slice = -1
		} else if deadline, ok := ctx.Deadline(); ok {
			slice = max(0, min(slice, time.Until(deadline).Microseconds()))
		}
		e := c.core.Wait(slice)
		runtime.KeepAlive(c)
		if e == nil {
			return nil
		}
		if e.Status != core.StatusPending {
			return fromCore("Wait", e)
		}
		if err := ctx.Err(); err != nil {
			return newError("Wait", err, "%s", err)
		}
	}
}

// Err is the communicator's failure: ErrTimeout, ErrMismatch, ErrDeviceLost or what else made it unusable, ErrClosed
// after Close without one; nil while it is good. It never waits.
func (c *Comm) Err() error {
	if c == nil || c.core == nil {
		return newError("Err", ErrClosed, "the communicator was not made by New")
	}
	e := c.core.Err()
	runtime.KeepAlive(c)
	if e == nil {
		return nil
	}
	return fromCore("Err", e)
}

// Close ends the communicator: it waits for the eager reductions made so far, at most a second in all, and ends kernels
// that still wait. Memory that a device or a graph still uses is freed later. A second Close does nothing and returns nil;
// every other method that can fail returns ErrClosed afterwards.
func (c *Comm) Close() error {
	if c == nil || c.core == nil {
		return nil
	}
	e := c.core.Close()
	if !c.life.closed.Swap(true) {
		c.party.leave()
	}
	runtime.KeepAlive(c)
	if e != nil {
		return fromCore("Close", e)
	}
	return nil
}

// Ranks is the number of ranks, in all processes.
func (c *Comm) Ranks() int { return c.world }

// LocalRanks gives the numbers of this process's ranks: all of them after New, one after Join. The slice is the caller's.
func (c *Comm) LocalRanks() []int { return slices.Clone(c.ranks) }

// Devices gives the device ordinal of each of this process's ranks; the slice is the caller's.
func (c *Comm) Devices() []int {
	out := make([]int, len(c.devices))
	for i, d := range c.devices {
		out[i] = int(d)
	}
	return out
}

// Backend says what the devices are: BackendCUDA or BackendEmulated.
func (c *Comm) Backend() Backend { return c.backend }
